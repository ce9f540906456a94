"""Functions and scripts in ranks, for any test framework, and what stands in for the harnesses of other projects."""

import typing as _typing

from torch_testing_ext._cases.scripts import ScriptRun as ScriptRun, run_script as run_script
from torch_testing_ext._cases.spawning import spawn as spawn
from torch_testing_ext._cases.stand_ins import (
    MultiProcessTestBase as MultiProcessTestBase,
    Pool as Pool,
    debug_launcher as debug_launcher,
    elastic_launch as elastic_launch,
    execute_subprocess_async as execute_subprocess_async,
    mp_spawn as mp_spawn,
    run_with_pet as run_with_pet,
    run_with_pet_async as run_with_pet_async,
    spawn_for_all_world_sizes as spawn_for_all_world_sizes,
)

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
