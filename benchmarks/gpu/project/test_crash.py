"""Ranks that use a GPU and crash."""

import ctypes
import os
import signal

import torch
import torch.distributed as dist

from torch_testing_ext.common_distributed import MultiProcessTestCase, skip_if_lt_x_gpu
from torch_testing_ext.common_utils import run_tests


class Crashes(MultiProcessTestCase):
    world_size = 1

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def use_gpu(self):
        torch.cuda.set_device(0)
        store = dist.FileStore(self.file_name, 1)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1)
        ours = torch.ones(2**20, device="cuda")
        dist.all_reduce(ours)
        torch.cuda.synchronize()

    @skip_if_lt_x_gpu(1)
    def test_killed(self):
        self.use_gpu()
        os.kill(os.getpid(), signal.SIGKILL)

    @skip_if_lt_x_gpu(1)
    def test_segmentation_fault(self):
        self.use_gpu()
        ctypes.string_at(0)

    @skip_if_lt_x_gpu(1)
    def test_out_of_memory(self):
        self.use_gpu()
        torch.empty(2**50, dtype=torch.uint8, device="cuda")

    @skip_if_lt_x_gpu(1)
    def test_device_assert(self):
        self.use_gpu()
        torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")]
        torch.cuda.synchronize()

    @skip_if_lt_x_gpu(1)
    def test_after(self):
        self.use_gpu()


if __name__ == "__main__":
    run_tests()
