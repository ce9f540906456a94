"""Hangs on a GPU: a kernel without end before a collective of NCCL, and a rank that does not come to a collective.

The latter also with one of the sources missing from which a report learns where the ranks are.
"""

import ctypes
import faulthandler
import os
import signal
import time

import torch
import torch.distributed as dist
from gpu_support import device, synchronize, use_gpu

from torch_testing_ext._process import system
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

    def hang(self, stay_away, **environ):
        # torch and NCCL read them when the group is made.
        os.environ.update(environ)
        self.create_pg(device())
        ours = torch.ones(2**10, device=device())
        dist.all_reduce(ours)
        synchronize()
        if self.rank == 1:
            stay_away()
        dist.all_reduce(ours)
        synchronize()

    @timeout(7)
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_one_does_not_come(self):
        self.hang(do_not_come)

    @timeout(7)
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_one_does_not_come_without_recorder(self):
        self.hang(do_not_come, TORCH_FR_BUFFER_SIZE="0", TORCH_NCCL_TRACE_BUFFER_SIZE="0")

    @timeout(7)
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_one_does_not_come_without_status(self):
        self.hang(do_not_come, NCCL_RAS_ENABLE="0")

    @timeout(7)
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_one_does_not_come_without_stacks(self):
        self.hang(do_not_come_in_c)


def do_not_come():
    time.sleep(600)


def do_not_come_in_c():
    """With the GIL, so that no thread of the rank answers, and deaf to the signal that asks for its stacks."""
    faulthandler.unregister(system.DUMP_STACKS_NOW)
    signal.signal(system.DUMP_STACKS_NOW, signal.SIG_IGN)
    ctypes.PyDLL(None).sleep(600)


if __name__ == "__main__":
    run_tests()
