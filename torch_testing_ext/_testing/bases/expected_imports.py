"""The modules that the ranks of a test file will import by themselves."""

import functools

from torch_testing_ext._testing.bases.source_facts import facts_of
from torch_testing_ext._torch.compiler_state import DYNAMO, INDUCTOR


@functools.cache
def expected_imports(file: str) -> tuple[str, ...]:
    """Return the modules that the ranks of a test file will import by themselves, told by the names in the file.

    Without this, each rank of the first test imports them, which takes seconds, and the fork server once more.
    """
    facts = facts_of(file)
    if not facts.dynamo:
        return ()
    return (DYNAMO, INDUCTOR) if facts.inductor else (DYNAMO,)
