"""Bases of test subjects that run in ranks, and the values that their ranks send."""

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from kit.outcomes import Seen, outcome_of
from torch_testing_ext.common_distributed import MultiProcContinuousTest, MultiProcessTestCase

A_WHILE = 0.5  # seconds; there is no event for something that does not happen


class Ranks(MultiProcessTestCase):
    """A base for tests in ranks, and for test subjects: those have names without `test`, `outcome_of` runs them."""

    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def join_group(self, **options: Any) -> None:
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size, **options)

    def tell(self, value: Any) -> None:
        """In a rank: send a value to the parent, where `ranks_told` returns it. Once per rank."""
        with open(os.path.join(os.environ["TELL"], str(self.rank)), "x") as file:
            json.dump(value, file)


class OneRank(Ranks):
    """A base for tests that must not change the process of the others: its modules, its threads, its groups."""

    world_size = 1


class FourRanks(Ranks):
    world_size = 4


def wait_for(condition: Callable[[], object]) -> None:
    """In a rank: wait for something that another rank does. The time-out of the test ends a wait in vain."""
    while not condition():
        time.sleep(0.001)


def stays_true(condition: Callable[[], object]) -> bool:
    """In a rank: whether something that another rank must not end holds for a while."""
    until = time.monotonic() + A_WHILE
    while time.monotonic() < until:
        if not condition():
            return False
        time.sleep(0.01)
    return True


def local_class() -> type[FourRanks]:
    """A class that only processes forked from this one can have."""

    class Local(FourRanks):
        def passes(self):
            pass

    return Local


class OnCpu(MultiProcContinuousTest):
    """A base for persistent ranks that use no accelerator."""

    world_size = 2

    @classmethod
    def backend_str(cls) -> str:
        return "gloo"

    @classmethod
    def device_type(cls) -> str:
        return "cpu"


def ranks_told(test: MultiProcessTestCase) -> list[Any]:
    """Run a test that passes, and return the values that its ranks sent, by rank."""
    seen, told = outcome_and_told(test)
    assert seen == ("passed", ""), f"{seen.outcome}: {seen.message}"
    return told


def outcome_and_told(test: MultiProcessTestCase) -> tuple[Seen, list[Any]]:
    with tempfile.TemporaryDirectory() as directory, mock.patch.dict(os.environ, TELL=directory):
        seen = outcome_of(test)
        return seen, [json.loads(file.read_text()) for file in sorted(Path(directory).iterdir())]
