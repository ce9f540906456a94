"""Which modules the ranks of a test file will import by themselves, told by the names that the file uses.

Without this, each rank of the first test imports them, which takes seconds, and the fork server afterwards once more.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

from torch_testing_ext._torch import DYNAMO, INDUCTOR

# The first use of these imports dynamo. A file that only mentions one loses the time of that one import.
_USES_DYNAMO = re.compile(
    r"\b(?:DistributedDataParallel|FullyShardedDataParallel|fully_shard|parallelize_module"
    r"|DTensor|distribute_tensor|distribute_module|torch\.compile)\b"
)
# Compiling by inductor imports as much again. Files that only compile for another backend do not mention it.
_USES_INDUCTOR = re.compile(r"\b_?inductor\b")
_COMPILER_STATE = "torch_testing_ext._cases.compiler_state"


@functools.cache
def expected_imports(file: str) -> tuple[str, ...]:
    """The modules for the ranks of this test file."""
    try:
        source = Path(file).read_text(errors="replace")
    except OSError:
        return ()
    if not _USES_DYNAMO.search(source):
        return ()
    return (DYNAMO, INDUCTOR, _COMPILER_STATE) if _USES_INDUCTOR.search(source) else (DYNAMO,)
