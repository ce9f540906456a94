"""The DTensor bases with threads and with persistent ranks, and the same on local tensors."""

from __future__ import annotations

import unittest
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from torch_testing_ext import common_utils
from torch_testing_ext._machine import accelerators
from torch_testing_ext.common_distributed import MultiProcContinuousTest, MultiThreadedTestCase
from torch_testing_ext.common_utils import TestCase, parametrize, run_tests
from torch_testing_ext.distributed._tensor.common_dtensor import (
    DTensorContinuousTestBase,
    DTensorOpTestBase,
    DTensorTestMixin,
    LocalDTensorContinuousTestBase,
    LocalDTensorOpTestBase,
    create_local_tensor_test_class,
    reduce_local_int,
    with_comms,
)


class InThreads(DTensorOpTestBase):
    """Methods have names without `test`, so that no loader collects them."""

    @with_comms
    def redistributes(self) -> None:
        mesh = self.build_device_mesh()
        full = torch.arange(8.0)
        sharded = distribute_tensor(full, mesh, [Shard(0)])
        self.assertEqual(sharded.to_local().numel() * self.world_size, 8)
        self.assertEqual(sharded.redistribute(mesh, [Replicate()]).to_local(), full)

    def takes_turns(self) -> None:
        """In DTensor's sharding rules; torch 2.11 has no lock there."""
        lock = getattr(ShardingPropagator, "_fake_mode_lock", None)
        self.assertTrue(lock is None or hasattr(lock, "acquire"))

    def fails(self) -> None:
        self.fail("as told")


class InPersistentRanks(DTensorContinuousTestBase):
    world_size = 2

    def redistributes(self) -> None:
        mesh = self.build_device_mesh()
        full = torch.arange(8.0)
        self.assertEqual(distribute_tensor(full, mesh, [Shard(0)]).redistribute(mesh, [Replicate()]).to_local(), full)
        self.assertEqual(self.device_type, "cpu")

    def runs_subtests(self) -> None:
        self.run_subtests({"dim": [0, 1]}, self.check)

    def check(self, dim: int) -> None:
        placed = distribute_tensor(torch.ones(2, 2), self.build_device_mesh(), [Shard(dim)])
        self.assertEqual(placed.full_tensor(), torch.ones(2, 2))

    def fails(self) -> None:
        self.fail("as told")


def on_local_tensors(cls: type, base: type) -> Any:
    """Do the same as create_local_tensor_test_class, which only finds names with `test`."""
    body = {f"test_{name}" if name in ("redistributes", "fails") else name: thing for name, thing in vars(cls).items()}
    renamed = type(cls.__name__, cls.__bases__, body)
    return create_local_tensor_test_class(renamed, base_class=base)


OpsOnLocalTensors = on_local_tensors(InThreads, LocalDTensorOpTestBase)
PersistentOnLocalTensors = on_local_tensors(InPersistentRanks, LocalDTensorContinuousTestBase)
LOCAL = {"operators": OpsOnLocalTensors, "continuous": PersistentOnLocalTensors}
del OpsOnLocalTensors, PersistentOnLocalTensors


def outcomes(cls: Any, *names: str) -> list[str]:
    """Return the outcomes of the tests, run with the set-up and tear-down of their class."""
    result = unittest.TestResult()
    found = []
    cls.setUpClass()
    try:
        for name in names:
            before = len(result.errors) + len(result.failures)
            cls(name).run(result)
            ended = [text for _, text in (*result.errors, *result.failures)]
            found.append("passed" if len(ended) == before else ended[-1])
    finally:
        cls.tearDownClass()
    return found


class TestThreads(TestCase):
    def test_operators(self) -> None:
        before = getattr(ShardingPropagator, "_fake_mode_lock", None)
        passed, locked, failed = outcomes(InThreads, "redistributes", "takes_turns", "fails")
        self.assertEqual((passed, locked), ("passed", "passed"))
        self.assertRegex(failed, "(rank [0-3] of|all) 4 (ranks )?failed: .*as told")
        self.assertIs(getattr(ShardingPropagator, "_fake_mode_lock", None), before)

    def test_base_classes(self) -> None:
        self.assertTrue(issubclass(DTensorOpTestBase, MultiThreadedTestCase))
        self.assertEqual((InThreads("fails").world_size, InThreads("fails").device_type), (4, "cpu"))


class TestContinuous(TestCase):
    def test_operators(self) -> None:
        passed, subtests, failed, again = outcomes(
            InPersistentRanks, "redistributes", "runs_subtests", "fails", "redistributes"
        )
        self.assertEqual((passed, subtests, again), ("passed",) * 3)
        self.assertRegex(failed, "(rank [01] of|all) 2 (ranks )?failed: .*as told")

    def test_base_classes(self) -> None:
        self.assertEqual(DTensorContinuousTestBase.__mro__[1:3], (DTensorTestMixin, MultiProcContinuousTest))
        self.assertEqual(InPersistentRanks._device_type(), "cpu")
        self.assertEqual(InPersistentRanks.backend_str(), "gloo")

    def test_fewer_devices_than_ranks(self) -> None:
        """Falls back to the CPU, as DTensorTestBase does."""
        with (
            mock.patch.object(accelerators, "device_count", return_value=1),
            mock.patch.object(accelerators, "accelerator_type", return_value="cuda"),
        ):
            self.assertEqual(InPersistentRanks._device_type(), "cpu")
            self.assertEqual(InPersistentRanks.backend_str(), "gloo")
        with (
            mock.patch.object(accelerators, "device_count", return_value=2),
            mock.patch.object(accelerators, "accelerator_type", return_value="cuda"),
        ):
            self.assertEqual(InPersistentRanks._device_type(), "cuda")
            self.assertEqual(InPersistentRanks.backend_str(), "nccl")


class TestLocalTensors(TestCase):
    @parametrize("kind", list(LOCAL))
    def test_outcomes(self, kind: str) -> None:
        passed, failed, again = outcomes(LOCAL[kind], "test_redistributes", "test_fails", "test_redistributes")
        self.assertEqual((passed, again), ("passed", "passed"))
        self.assertRegex(failed, "as told")
        self.assertFalse(dist.is_initialized())

    @parametrize("kind,size", [("operators", 4), ("continuous", 2)])
    def test_rank(self, kind: str, size: int) -> None:
        test = LOCAL[kind]("test_fails")
        self.assertEqual(reduce_local_int(test.rank, dict), {rank: rank for rank in range(size)})
        self.assertTrue(test.is_local_tensor_enabled)


common_utils.instantiate_parametrized_tests(TestLocalTensors)

if __name__ == "__main__":
    run_tests()
