"""Ranks that use a GPU and crash."""

import ctypes
import os
import signal

import torch
import torch.distributed as dist
from gpu_support import use_gpu

from torch_testing_ext.common_distributed import (
    DistributedTestBase,
    MultiProcContinuousTest,
    MultiProcessTestCase,
    skip_if_lt_x_gpu,
)
from torch_testing_ext.common_utils import run_tests


def trip_an_assertion():
    """An index out of bounds, which a kernel asserts."""
    torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")]
    torch.cuda.synchronize()


class Crashes(MultiProcessTestCase):
    world_size = 1

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    @skip_if_lt_x_gpu(1)
    def test_killed(self):
        use_gpu(self)
        os.kill(os.getpid(), signal.SIGKILL)

    @skip_if_lt_x_gpu(1)
    def test_segmentation_fault(self):
        use_gpu(self)
        ctypes.string_at(0)

    @skip_if_lt_x_gpu(1)
    def test_out_of_memory(self):
        use_gpu(self)
        torch.empty(2**50, dtype=torch.uint8, device="cuda")

    @skip_if_lt_x_gpu(1)
    def test_device_assert(self):
        use_gpu(self)
        trip_an_assertion()

    @skip_if_lt_x_gpu(1)
    def test_zz_after(self):
        """By its name and its line, the last one of its class."""
        use_gpu(self)


class OneOfTwo(DistributedTestBase):
    world_size = 2

    @skip_if_lt_x_gpu(2)
    def test_device_assert_of_rank_1(self):
        self.create_pg("cuda")
        ours = torch.ones(4, device="cuda")
        dist.all_reduce(ours)
        torch.cuda.synchronize()
        if self.rank == 1:
            trip_an_assertion()
        dist.all_reduce(ours)
        torch.cuda.synchronize()


class Persistent(MultiProcContinuousTest):
    world_size = 1

    @classmethod
    def backend_str(cls):
        return "nccl"

    @skip_if_lt_x_gpu(1)
    def test_persistent_device_assert(self):
        trip_an_assertion()

    @skip_if_lt_x_gpu(1)
    def test_persistent_later(self):
        ours = torch.ones(4, device="cuda")
        dist.all_reduce(ours)
        self.assertEqual(ours.sum().item(), 4)


if __name__ == "__main__":
    run_tests()
