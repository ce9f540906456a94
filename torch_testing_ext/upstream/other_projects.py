"""The changes to the tests of each project, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Project:
    """The conversion of one project's tests."""

    # By the module that the project imports them from: names, and what they are in `torch_testing_ext.ranks`. A module
    # may be named by its last parts.
    names: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    # By the name of a function of a module: regular expressions for its source, and replacements. They must not match
    # what they have made.
    functions: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    # Names and strings in whose lines something is left to do, and what.
    by_hand: Mapping[str, str] = field(default_factory=dict)
    uses_torchs_kit: bool = False  # imports of torch.testing._internal are rewritten
    after: str = ""  # said at the end


def _names(*same: str, **other: str) -> dict[str, str]:
    return {**{name: name for name in same}, **other}


# A fixture that prepares ranks asks for `ranks`, and has the scope `function`.
_OF_RANKS = (
    (r",\s*scope=['\"](class|module|session)['\"]|scope=['\"](class|module|session)['\"],?", ""),
    (r"(\ndef \w+\()(?!ranks\b)(?=[^)])", r"\1ranks, "),
    (r"(\ndef \w+\()\)", r"\1ranks)"),
)
_SPAWN = {"torch.multiprocessing": _names(spawn="mp_spawn")}
_COMPOSER_ITEMS = '''\
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run every test in as many ranks as its mark says, by default in one."""
    for item in items:
        if item.get_closest_marker('world_size') is None:
            item.add_marker(pytest.mark.world_size(1))
'''
_IGNITE_RANK = '''\
def pytest_collection_modifyitems(items):
    """Run the tests that are marked `distributed` in ranks: pytest -m distributed -o dist_collect_env=WORLD_SIZE=4"""
    if (size := int(os.environ.get("WORLD_SIZE", 1))) > 1:
        for item in items:
            if item.get_closest_marker("distributed"):
                item.add_marker(pytest.mark.world_size(size))


@pytest.fixture()
def local_rank(ranks, monkeypatch):
    if ranks is None:
        monkeypatch.setenv("LOCAL_RANK", "0")
        return 0
    monkeypatch.setenv("FREE_PORT", os.environ["MASTER_PORT"])
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name)
    return ranks.local_rank
'''
_IGNITE_PORT = """\
def _setup_free_port(local_rank):
    return int(os.environ.get("FREE_PORT") or _find_free_port())
"""

PROJECTS: Mapping[str, Project] = {
    "accelerate": Project(
        names={
            "accelerate": _names("debug_launcher"),
            "accelerate.launchers": _names("debug_launcher"),
            "accelerate.test_utils": _names("execute_subprocess_async"),
            "accelerate.test_utils.testing": _names("execute_subprocess_async"),
        },
    ),
    "composer": Project(
        functions={
            "pytest_collection_modifyitems": ((r"^.*conditions = .*$", _COMPOSER_ITEMS),),
            "configure_dist": _OF_RANKS,
            "seed_all": _OF_RANKS,
        },
        after="One run of pytest has the tests of every world size: no launcher, and no WORLD_SIZE in the environment.",
    ),
    "deepspeed": Project(
        names={"unit.common": _names("DistributedTest", "DistributedFixture")},
        by_hand={
            "_launch_procs": "set `backend`, or let a fixture that asks for `dist_env` prepare the ranks",
            "_dist_run": "set `init`, or let a fixture that asks for `dist_env` prepare the ranks",
            "_pool_cache": "there is no pool: every test has fresh ranks",
            "_close_pool": "there is no pool: every test has fresh ranks",
        },
    ),
    "fairscale": Project(names={"fair_dev.testing.testing": _names("spawn_for_all_world_sizes"), **_SPAWN}),
    "ignite": Project(
        functions={
            "local_rank": ((r"^.*worker_id.*$", _IGNITE_RANK),),
            "_setup_free_port": ((r"^.*port_file.*$", _IGNITE_PORT),),
            "world_size": _OF_RANKS,
            "distributed": _OF_RANKS,
        },
        after="The tests of several ranks: pytest -m distributed -o dist_collect_env=WORLD_SIZE=4",
    ),
    "spawn": Project(names=_SPAWN),
    "torchmetrics": Project(
        names={"torch.multiprocessing": _names("Pool")},
        functions={"pytest_sessionstart": ((r"\n *pool\.starmap\(setup_ddp, [^\n]*", ""),)},
    ),
    "torchrec": Project(
        names={"distributed.test_utils.multi_process": _names("MultiProcessTestBase")},
        by_hand={"run_multi_process_func": "it starts interpreters, as before; `spawn` starts fresh ranks"},
    ),
    "torchsnapshot": Project(
        names={
            "torchsnapshot.test_utils": _names("run_with_pet", "run_with_pet_async"),
            "torch.distributed.launcher": _names("elastic_launch"),
        },
    ),
    "torchtitan": Project(uses_torchs_kit=True),
}
