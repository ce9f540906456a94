"""The modules that the ranks of a test file will import by themselves, told by the names that the file uses.

Without this, each rank of the first test imports them, which takes seconds, and the fork server afterwards once more.
"""

from __future__ import annotations

import functools

from torch_testing_ext._torch.process_state import DYNAMO, INDUCTOR

from .source_facts import facts_of


@functools.cache
def expected_imports(file: str) -> tuple[str, ...]:
    """The modules for the ranks of this test file."""
    facts = facts_of(file)
    if not facts.dynamo:
        return ()
    return (DYNAMO, INDUCTOR) if facts.inductor else (DYNAMO,)
