"""The FSDP bases with persistent ranks and with threads."""

from __future__ import annotations

import unittest
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from torch_testing_ext._testing.sharded import fsdp_devices
from torch_testing_ext.common_distributed import skip_if_lt_x_gpu
from torch_testing_ext.common_fsdp import FSDPTestContinuous, FSDPTestMixin, FSDPTestMultiThread
from torch_testing_ext.common_utils import TestCase, run_tests


class InPersistentRanks(FSDPTestContinuous):
    """Methods have names without `test`, so that no loader collects them."""

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def has_a_group(self) -> None:
        self.assertIs(self.process_group, dist.group.WORLD)
        self.assertEqual((self.process_group.size(), dist.get_backend()), (2, "gloo"))

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def runs_subtests(self) -> None:
        self.run_subtests({"size": [1, 2]}, lambda size: dist.all_reduce(torch.ones(size)))

    def says_nothing_of_the_cpu(self) -> None: ...

    @skip_if_lt_x_gpu(2)
    def needs_devices(self) -> None: ...


class InThreads(FSDPTestMultiThread):
    world_size = 2

    def runs_subtests(self) -> None:
        self.run_subtests({"size": [1, 2]}, lambda size: dist.all_reduce(torch.ones(size)))

    def fails(self) -> None:
        self.assertEqual(self.rank, 0)


def outcome(cls: Any, name: str) -> str:
    result = unittest.TestResult()
    cls(name).run(result)
    texts = [text for found in (result.errors, result.failures, result.skipped) for _, text in found]
    return texts[0] if texts else "passed"


class TestContinuous(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.addCleanup(InPersistentRanks.tearDownClass)
        fsdp_devices.use_device_type("cpu")
        self.addCleanup(fsdp_devices.use_device_type, None)

    def test_passes(self) -> None:
        self.assertEqual(outcome(InPersistentRanks, "has_a_group"), "passed")
        self.assertEqual(outcome(InPersistentRanks, "runs_subtests"), "passed")

    def test_on_the_cpu_only_where_the_test_allows_it(self) -> None:
        self.assertRegex(outcome(InPersistentRanks, "says_nothing_of_the_cpu"), "No accelerator")
        self.assertRegex(outcome(InPersistentRanks, "needs_devices"), "No accelerator")

    def test_base_classes(self) -> None:
        self.assertTrue(issubclass(FSDPTestContinuous, FSDPTestMixin))
        self.assertEqual((InPersistentRanks.device_type(), InPersistentRanks.backend_str()), ("cpu", "gloo"))


class TestThreads(TestCase):
    def test_outcomes(self) -> None:
        self.assertEqual(outcome(InThreads, "runs_subtests"), "passed")
        self.assertRegex(outcome(InThreads, "fails"), "rank 1 of 2 failed")

    def test_one_thread_per_device(self) -> None:
        with mock.patch.object(fsdp_devices, "device_count", return_value=7):
            self.assertEqual(FSDPTestMultiThread().world_size, 7)


if __name__ == "__main__":
    run_tests()
