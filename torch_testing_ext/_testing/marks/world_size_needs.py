"""Needs of the number of ranks that the variables of a launcher name."""

import os
from collections.abc import Callable

from .needs import TEST_SKIPS, Need, TestSkip, requires


def world_size_in_environ() -> int:
    return int(os.environ["WORLD_SIZE"])


def _unless_mpi(skip: Callable[[int], bool], name: str) -> Need:
    def unmet() -> TestSkip | None:
        if os.environ.get("BACKEND") == "mpi" or not skip(world_size_in_environ()):
            return None
        return TEST_SKIPS[name]

    return Need(unmet)


skip_if_small_worldsize = requires(_unless_mpi(lambda size: size < 8, "small_worldsize"))
skip_if_odd_worldsize = requires(_unless_mpi(lambda size: size % 2 == 1, "odd_worldsize"))
