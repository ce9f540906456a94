"""Tests with two ranks, some of which fail in only one rank."""

import os
import signal
import sys
import threading
import unittest

import torch
import torch.distributed as dist

from torch_testing_ext.common_distributed import MultiProcessTestCase, skip_if_lt_x_gpu
from torch_testing_ext.common_utils import run_tests, timeout


class RanksTest(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_passes(self):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        self.assertEqual(tensor, torch.full((2,), 2.0))
        print(f"rank {self.rank} has reduced")

    def test_fails_in_one_rank(self):
        print(f"rank {self.rank} is about to compare")
        self.assertEqual(self.rank, 0)

    def test_fails_in_all_ranks(self):
        raise LookupError(f"no such layer in rank {self.rank}")

    def test_skips(self):
        raise unittest.SkipTest("no rank wants to")

    def test_skips_in_one_rank(self):
        if self.rank == 1:
            raise unittest.SkipTest("rank 1 does not want to")

    def test_crashes_in_one_rank(self):
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGSEGV)

    def test_exits_in_one_rank(self):
        if self.rank == 1:
            sys.stdout.flush()
            os._exit(0)

    @timeout(1)
    def test_hangs_in_one_rank(self):
        if self.rank == 1:
            threading.Event().wait(600)

    @skip_if_lt_x_gpu(4096)
    def test_wants_devices(self):
        self.fail("no machine has so many")


if __name__ == "__main__":
    run_tests()
