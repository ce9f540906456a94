"""Helpers to run one method in ranks, and to get its outcome and a value from each rank."""

import json
import os
import tempfile
import unittest
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist

from torch_testing_ext.common_distributed import MultiProcContinuousTest, MultiProcessTestCase


class Ranks(MultiProcessTestCase):
    """A base for test subjects, whose methods have names without `test`, so that no loader collects them."""

    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def join_group(self):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)

    def tell(self, value: Any) -> None:
        """In a rank: send a value to the parent, where `ranks_told` returns it. Once per rank."""
        with open(os.path.join(os.environ["TELL"], str(self.rank)), "x") as file:
            json.dump(value, file)


class OnCpu(MultiProcContinuousTest):
    """A base for persistent ranks that use no accelerator."""

    world_size = 2

    @classmethod
    def backend_str(cls) -> str:
        return "gloo"

    @classmethod
    def device_type(cls) -> str:
        return "cpu"


class Seen(NamedTuple):
    outcome: str  # passed, skipped, failed, error, expected failure, unexpected success
    message: str


def outcome_of(test: unittest.TestCase) -> Seen:
    """Run one test case, and return its outcome in unittest."""
    result = unittest.TestResult()
    test.run(result)
    for outcome, entries in (
        ("error", result.errors),
        ("failed", result.failures),
        ("skipped", result.skipped),
        ("expected failure", result.expectedFailures),
    ):
        if entries:
            return Seen(outcome, "\n".join(text for _, text in entries))
    return Seen("unexpected success" if result.unexpectedSuccesses else "passed", "")


def ranks_told(test: MultiProcessTestCase) -> list[Any]:
    """Run a test that passes, and return the values that its ranks sent, by rank."""
    seen, told = outcome_and_told(test)
    assert seen == ("passed", ""), f"{seen.outcome}: {seen.message}"
    return told


def outcome_and_told(test: MultiProcessTestCase) -> tuple[Seen, list[Any]]:
    with tempfile.TemporaryDirectory() as directory, mock.patch.dict(os.environ, TELL=directory):
        seen = outcome_of(test)
        return seen, [json.loads(file.read_text()) for file in sorted(Path(directory).iterdir())]
