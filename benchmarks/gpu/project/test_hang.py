"""Hangs on a GPU: a kernel without end before a collective of NCCL, and a rank that does not come to a collective."""

import time

import torch
import torch.distributed as dist
from gpu_support import use_gpu

from torch_testing_ext.common_distributed import DistributedTestBase, MultiProcessTestCase, skip_if_lt_x_gpu
from torch_testing_ext.common_utils import run_tests, timeout


class Alone(MultiProcessTestCase):
    world_size = 1

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    @timeout(10)
    @skip_if_lt_x_gpu(1)
    def test_nccl_behind_a_kernel(self):
        ours = use_gpu(self)
        torch.cuda._sleep(200 * 10**9)  # about 100 s
        dist.all_reduce(ours)
        torch.cuda.synchronize()


class Two(DistributedTestBase):
    world_size = 2

    @timeout(15)
    @skip_if_lt_x_gpu(2)
    def test_one_does_not_come(self):
        self.create_pg("cuda")
        ours = torch.ones(2**10, device="cuda")
        dist.all_reduce(ours)
        torch.cuda.synchronize()
        if self.rank == 1:
            self.do_not_come()
        dist.all_reduce(ours)
        torch.cuda.synchronize()

    def do_not_come(self):
        time.sleep(600)


if __name__ == "__main__":
    run_tests()
