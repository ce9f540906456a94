"""Facts from the source of a test file before its import: the parts of torch that it uses, and how many test."""

import re
from typing import NamedTuple

from torch_testing_ext._tests.source_files import source_text

# Keeps these frames out of tracebacks: the message is complete.
__unittest = True


# The first use of these imports dynamo. A file that only mentions one loses the time of that one import.
_DYNAMO = re.compile(
    r"\b(?:DistributedDataParallel|FullyShardedDataParallel|fully_shard|parallelize_module"
    r"|DTensor|distribute_tensor|distribute_module|torch\.compile)\b"
)


# Compiling by inductor imports as much again. Files that only compile for another backend do not mention it.
_INDUCTOR = re.compile(r"\b_?inductor\b")


_FSDP = re.compile(r"fsdp|fully_?shard", re.IGNORECASE)


_DTENSOR = re.compile(r"dtensor|_tensor\b|\bdistributed\.tensor\b|parallelize_module", re.IGNORECASE)


_TEST = re.compile(r"^\s*(?:async )?def test", re.MULTILINE)


_GENERATES = re.compile(r"\binstantiate_\w+_tests\b|\bparametriz|\bsetattr\(|\bload_tests\b")


class SourceFacts(NamedTuple):
    """Facts from the source of a file."""

    fsdp: bool = False
    dtensor: bool = False
    dynamo: bool = False
    inductor: bool = False
    # Functions that look like tests.
    tests: int = 0
    # More tests than there are such functions.
    generates: bool = False


def facts_of(file: str) -> SourceFacts:
    """Return the facts of a file; none if it cannot be read."""
    source = source_text(file)
    uses_dynamo = bool(_DYNAMO.search(source))
    return SourceFacts(
        fsdp=bool(_FSDP.search(source)),
        dtensor=bool(_DTENSOR.search(source)),
        dynamo=uses_dynamo,
        inductor=uses_dynamo and bool(_INDUCTOR.search(source)),
        tests=len(_TEST.findall(source)),
        generates=bool(_GENERATES.search(source)),
    )
