"""Ranks that use a GPU and crash."""

import ctypes
import os
import signal

import torch
from gpu_support import use_gpu

from torch_testing_ext.common_distributed import MultiProcessTestCase, skip_if_lt_x_gpu
from torch_testing_ext.common_utils import run_tests


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
        torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")]
        torch.cuda.synchronize()

    @skip_if_lt_x_gpu(1)
    def test_after(self):
        use_gpu(self)


if __name__ == "__main__":
    run_tests()
