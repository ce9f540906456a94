"""Ranks that are killed while they are in a collective of NCCL."""

import os
import signal
import threading

import torch
import torch.distributed as dist
from gpu_support import use_gpu

from torch_testing_ext.common_distributed import DistributedTestBase, MultiProcessTestCase, skip_if_lt_x_gpu
from torch_testing_ext.common_utils import run_tests


def kill_soon():
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()


class Alone(MultiProcessTestCase):
    world_size = 1

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    @skip_if_lt_x_gpu(1)
    def test_alone(self):
        ours = use_gpu(self)
        torch.cuda._sleep(200 * 10**9)  # about 100 s
        dist.all_reduce(ours)
        kill_soon()
        torch.cuda.synchronize()


class Two(DistributedTestBase):
    world_size = 2

    @skip_if_lt_x_gpu(2)
    def test_with_a_peer(self):
        self.create_pg("cuda")
        ours = torch.ones(2**20, device="cuda")
        dist.all_reduce(ours)
        torch.cuda.synchronize()
        if self.rank == 1:
            torch.cuda._sleep(200 * 10**9)
            kill_soon()
        dist.all_reduce(ours)
        torch.cuda.synchronize()


if __name__ == "__main__":
    run_tests()
