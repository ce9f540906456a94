"""A test file written for PyTorch, with every base and every form of import.

test_drop_in_outcomes runs it unmodified, on PyTorch's classes and on ours. On PyTorch's, every test with ranks takes
seconds, so there are few of them, with few ranks.
"""

import os
from unittest import mock

import torch
import torch.distributed as dist
import torch.testing._internal.common_utils as common
from torch.testing._internal import common_distributed
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_distributed import *  # noqa: F403
from torch.testing._internal.common_distributed import (
    DistributedTestBase,
    MultiProcContinuousTest,
    MultiProcessTestCase,
    MultiThreadedTestCase,
    skip_if_lt_x_gpu,
)
from torch.testing._internal.common_fsdp import FSDPTest, FSDPTestContinuous, FSDPTestMultiThread
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch.testing._internal.distributed._shard.sharded_tensor import ShardedTensorTestBase
from torch.testing._internal.distributed._tensor.common_dtensor import (
    DTensorContinuousTestBase,
    DTensorOpTestBase,
    DTensorTestBase,
    LocalDTensorTestBase,
    with_comms,
)


class OneProcessTest(common.TestCase):
    def test_compares_tensors(self):
        self.assertEqual(torch.ones(3), torch.ones(3) + 1e-9)

    def test_fails(self):
        self.assertEqual(torch.ones(3), torch.zeros(3))

    @common.skipIfTorchDynamo("no reason")
    def test_uses_a_member_of_pytorchs(self):
        sparse, _, _ = self.genSparseTensor((4, 3), 2, 5, False, "cpu", torch.float64)
        self.assertEqual(sparse.shape, (4, 3))

    @common.decorateIf(common.unittest.expectedFailure, lambda given: given["number"] == 2)
    @parametrize("number", [1, 2])
    def test_parametrized(self, number):
        self.assertEqual(number, 1)

    def test_is_patched_by_name(self):
        with mock.patch("torch.testing._internal.common_distributed.TIMEOUT_DEFAULT", 7):
            self.assertEqual(get_timeout("x"), 7)  # noqa: F405
        self.assertNotEqual(common_distributed.get_timeout("x"), 7)

    def test_imports_inside(self):
        from torch.testing._internal.common_distributed import TEST_SKIPS

        self.assertEqual(TEST_SKIPS["generic"].exit_code, 86)


instantiate_parametrized_tests(OneProcessTest)


class Ranks:
    world_size = 2

    def meet(self):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)

    def sum_over_ranks(self):
        tensor = torch.full((2,), float(self.rank + 1))
        dist.all_reduce(tensor)
        self.assertEqual(tensor, torch.full((2,), 3.0))


class ProcessesTest(Ranks, MultiProcessTestCase):
    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_sum(self):
        from torch.testing._internal.common_utils import TestCase

        self.assertIsInstance(self, TestCase)
        self.meet()
        self.sum_over_ranks()

    def test_one_rank_exits(self):
        if self.rank == 1:
            os._exit(3)


class DevicesTest(DistributedTestBase):
    world_size = 1

    @parametrize("skipped", [True])
    def test_skips(self, device, skipped):
        if skipped:
            self.skipTest(f"on {device}")


instantiate_device_type_tests(DevicesTest, globals(), only_for="cpu")


class DTensorsTest(DTensorTestBase):
    world_size = 2

    @with_comms
    def test_full_tensor(self):
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = self.build_device_mesh()
        self.assertEqual(distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]).full_tensor(), torch.arange(4.0))


class LocalTest(LocalDTensorTestBase):
    world_size = 2

    @with_comms
    def test_mesh(self):
        self.assertEqual(self.build_device_mesh().size(), 2)


class ShardedTensorsTest(ShardedTensorTestBase):
    """PyTorch's own class, on PyTorch's MultiProcessTestCase."""

    world_size = 2

    def test_sum(self):
        self.init_pg("gloo")
        Ranks.sum_over_ranks(self)


class FullyShardedTest(FSDPTest):
    world_size = 1

    @skip_if_lt_x_gpu(64)
    def test_needs_many(self):
        raise AssertionError("not that many devices")


class ThreadsTest(Ranks, MultiThreadedTestCase):
    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def test_sum(self):
        self.sum_over_ranks()


class OpsTest(DTensorOpTestBase):
    world_size = 2

    @property
    def device_type(self):
        return "cpu"

    def test_mesh(self):
        self.assertEqual(self.build_device_mesh().size(), 2)


class FullyShardedThreadsTest(FSDPTestMultiThread):
    world_size = 2

    def test_world(self):
        self.assertEqual(dist.get_world_size(), 2)


class PersistentTest(Ranks, MultiProcContinuousTest):
    @classmethod
    def backend_str(cls):
        return "gloo"

    def test_fills(self):
        type(self).filled = True

    def test_sum(self):
        self.assertTrue(self.filled, "the ranks of one class persist from test to test")
        self.sum_over_ranks()


class PersistentDTensorsTest(DTensorContinuousTestBase):
    world_size = 2
    device_type = "cpu"

    @classmethod
    def backend_str(cls):
        return "gloo"

    def test_mesh(self):
        self.assertEqual(self.build_device_mesh().size(), 2)


class FullyShardedPersistentTest(FSDPTestContinuous):
    @skip_if_lt_x_gpu(8)
    def test_needs_many(self):
        raise AssertionError("not that many devices")


if __name__ == "__main__":
    run_tests()
