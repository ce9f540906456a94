"""Functions and scripts in ranks, for any test framework, and what stands in for the harnesses of other projects."""

import typing as _typing

from torch_testing_ext._testing.bases.functions_and_scripts import (
    MultiProcessTestBase as MultiProcessTestBase,
    Pool as Pool,
    ScriptRun as ScriptRun,
    debug_launcher as debug_launcher,
    mp_spawn as mp_spawn,
    run_script as run_script,
    spawn as spawn,
)

if _typing.TYPE_CHECKING:
    from torch_testing_ext._testing.bases.distributed_exec import (
        DistributedFixture as DistributedFixture,
        DistributedTest as DistributedTest,
    )


def __getattr__(name: str) -> _typing.Any:
    if name in ("DistributedFixture", "DistributedTest"):  # they need pytest
        from torch_testing_ext._testing.bases import distributed_exec

        return getattr(distributed_exec, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
