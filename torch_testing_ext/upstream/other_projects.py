"""The changes to the tests of each project, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Project:
    """The conversion of one project's tests."""

    # The module of `torch_testing_ext.compat` that has the names which move.
    stand_in: str = ""
    # Names by the module that the project imports them from, and what they are in that module. A module may be named
    # by its last parts.
    names: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    # Names and strings in whose lines something is left to do, and what.
    by_hand: Mapping[str, str] = field(default_factory=dict)
    uses_torchs_kit: bool = False  # imports of torch.testing._internal are rewritten

    @property
    def ours(self) -> str:
        """The module that has the names which move; nothing here depends on it."""
        return f"{__name__.partition('.')[0]}.compat.{self.stand_in}"


def _names(*same: str, **other: str) -> dict[str, str]:
    return {**{name: name for name in same}, **other}


PROJECTS: Mapping[str, Project] = {
    "accelerate": Project(
        "accelerate",
        names={
            "accelerate": _names("debug_launcher"),
            "accelerate.launchers": _names("debug_launcher"),
        },
        by_hand={"execute_subprocess_async": "it starts a launcher, as before; `run_script` starts fresh ranks"},
    ),
    "deepspeed": Project(
        "deepspeed",
        names={"unit.common": _names("DistributedTest", "DistributedFixture")},
        by_hand={
            "_launch_procs": "set `backend`, or let a fixture that asks for `dist_env` prepare the ranks",
            "_dist_run": "set `init`, or let a fixture that asks for `dist_env` prepare the ranks",
            "_pool_cache": "there is no pool: every test has fresh ranks",
            "_close_pool": "there is no pool: every test has fresh ranks",
        },
    ),
    "spawn": Project("torch_multiprocessing", names={"torch.multiprocessing": _names(spawn="mp_spawn")}),
    "torchmetrics": Project(
        "torch_multiprocessing",
        names={"torch.multiprocessing": _names("Pool")},
        by_hand={"setup_ddp": "delete the call by the pool: its ranks have a process group"},
    ),
    "torchrec": Project(
        "torchrec",
        names={"distributed.test_utils.multi_process": _names("MultiProcessTestBase")},
        by_hand={"run_multi_process_func": "it starts interpreters, as before; `spawn` starts fresh ranks"},
    ),
    "torchtitan": Project(uses_torchs_kit=True),
}
