"""Functions and scripts in ranks, for any test framework; for pytest, classes with the names of DeepSpeed's tests."""

import typing as _typing

from torch_testing_ext._cases.scripts import ScriptRun as ScriptRun, run_script as run_script
from torch_testing_ext._cases.spawning import spawn as spawn

if _typing.TYPE_CHECKING:
    from torch_testing_ext._cases.distributed_exec import (
        DistributedFixture as DistributedFixture,
        DistributedTest as DistributedTest,
    )


def __getattr__(name: str) -> _typing.Any:
    if name in ("DistributedFixture", "DistributedTest"):  # they need pytest
        from torch_testing_ext._cases import distributed_exec

        return getattr(distributed_exec, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
