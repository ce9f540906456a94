"""Whole worlds: tests in many ranks that do not communicate, one after the other."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch_testing_ext._process.declarations import AskedOptions, Option, Setting, number, variables_of
from torch_testing_ext._process.setting_readers import count
from torch_testing_ext.launch.aspect import Aspect
from torch_testing_ext.launch.host_kinds import HostKind

if TYPE_CHECKING:
    from torch_testing_ext.launch.attempts import Host


# The ranks of the world that tests run in; None: they communicate.
SIZE: Setting[int | None] = Setting("_TORCH_TESTING_EXT_WORLD", "a number of ranks", number, None)
# The number of ranks of tests with the mark, in place of that of the mark; None: as their marks say.
SIZE_OF_MARKS: Setting[int | None] = Setting("_TORCH_TESTING_EXT_WORLD_SIZE", "a number of ranks", number, None)
_WORLD_SIZE = Option(
    "world_size",
    "execution",
    count,
    "run marked tests in N ranks",
    "N",
    kind=int | None,
    setting=SIZE_OF_MARKS,
    apart={"simulate": "whole worlds have a size of their own. Leave out one of them"},
)
_WORLD = Option(
    "simulate",
    "diagnosis",
    count,
    "simulate N ranks, without communication",
    "N",
    kind=int | None,
    setting=SIZE,
    pytest_help="simulate each test in ranks with N ranks, without communication",
    apart={
        "delays": "ranks of a whole world wait for nobody, so delays change nothing. Leave out one of them",
        "cluster": "ranks of a whole world run on this machine. Leave out one of them",
        "fake_accelerators": "ranks of a whole world use the CPU. Leave out one of them",
        "ranks_per_gpu": "ranks of a whole world use the CPU. Leave out one of them",
        "sanitize": "ranks of a whole world are compared anyway. Leave out --sanitize",
        "sweep": "ranks of a whole world wait for nobody, so a fault hangs none of them. Leave out one of them",
    },
)


class WorldOfTests(Aspect):
    """Runs tests in whole worlds instead of in ranks that communicate."""

    name = "world"
    is_always_on = False
    gaps = MappingProxyType(
        {
            HostKind.OWN: "its class starts or judges its ranks itself",
            HostKind.SCRIPT: "a script decides itself what its processes do",
            HostKind.TORCHRUN: "a script decides itself what its processes do",
            HostKind.LAUNCHED: "the launcher has started the ranks: run the test without it",
        }
    )
    options = (_WORLD_SIZE, _WORLD)

    def begin(self, asked: AskedOptions, runs_tests: bool) -> None:
        """Tests are collected in the ranks of the run, too: a list of sizes makes a test for each."""
        os.environ.update(variables_of((_WORLD_SIZE,), asked))

    def require(self, asked: AskedOptions) -> None:
        size = asked.value(_WORLD)
        if size is None:
            return
        from torch_testing_ext.launch.launched_by import this_launch
        from torch_testing_ext.launch.most_ranks import too_many_in_world

        if why := too_many_in_world(size):
            raise ValueError(f"{_WORLD.flag} {size}: {why}")

        if this_launch() is not None:
            raise ValueError(f"{_WORLD.flag} starts its ranks itself: run it without a launcher")

    def header(self, asked: AskedOptions) -> str:
        size = asked.value(_WORLD)
        if size is None:
            return ""
        from torch_testing_ext._collectives.worlds.world_views import describe_world

        return describe_world(size)

    def facts(self, asked: AskedOptions) -> Mapping[str, str]:
        line = self.header(asked)
        return {"world": line} if line else {}

    def tests(self, asked: AskedOptions, tests: Sequence[Any]) -> Sequence[Any]:
        """None needs devices, and those without ranks are skipped."""
        size = asked.value(_WORLD)
        if size is None:
            return tests
        from dataclasses import replace

        from torch_testing_ext._collectives.worlds.world_views import HAS_NO_RANKS, not_in_world

        if tests and not any(test.has_ranks or test.is_whole_world for test in tests):
            raise ValueError(
                f"{_WORLD.flag} {size}: none of the selected tests has ranks. Name tests of MultiProcessTestCase, with "
                f"pytest.mark.world_size or the like, or leave out {_WORLD.flag}"
            )
        changed = []
        for test in tests:
            if test.has_ranks or test.is_whole_world:
                changed.append(replace(test, world_size=size, devices=0, shared_by=0))
            else:
                changed.append(replace(test, skip=test.skip or not_in_world(size, HAS_NO_RANKS)))
        return changed

    def host_of(self, host: Host) -> Host:
        size = SIZE.value()
        return host if size is None or host.kind is HostKind.WORLD else host.in_world(size)


WORLD = WorldOfTests()
