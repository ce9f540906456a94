import os
import signal
import time

import torch
import torch.distributed as dist
from ranks import RanksTestCase

from torch_testing_ext.common_utils import run_tests, timeout


class FaultTest(RanksTestCase):
    def test_mismatch(self):
        self.join()
        if self.rank == 1:
            dist.broadcast(torch.ones(8), 0)
        else:
            dist.all_reduce(torch.ones(4))

    @timeout(4)
    def test_hang(self):
        self.join()
        dist.all_reduce(torch.ones(4))
        if self.rank == 2:
            time.sleep(1000)
        dist.all_reduce(torch.ones(4))

    def test_early_return(self):
        self.join()
        for _ in range(2):
            dist.all_reduce(torch.ones(4))
        if self.rank == 0:
            return
        dist.all_reduce(torch.ones(4))

    def test_one_rank_raises(self):
        self.join()
        if self.rank == 1:
            raise ValueError("the batch of rank 1 is empty")
        dist.all_reduce(torch.ones(4))

    def test_raises_before_finally(self):
        self.join()
        try:
            if self.rank == 1:
                raise ValueError("the batch of rank 1 is empty")
            dist.all_reduce(torch.ones(4))
        finally:
            dist.barrier()

    def test_crash(self):
        self.join()
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        dist.all_reduce(torch.ones(4))

    def test_exit(self):
        self.join()
        if self.rank == 1:
            os._exit(3)
        dist.all_reduce(torch.ones(4))

    def test_deadlock(self):
        self.join()
        first = dist.new_group([0, 1])
        second = dist.new_group([0, 1])
        if self.rank == 0:
            dist.all_reduce(torch.ones(1), group=first)
            dist.all_reduce(torch.ones(1), group=second)
        elif self.rank == 1:
            dist.all_reduce(torch.ones(1), group=second)
            dist.all_reduce(torch.ones(1), group=first)


if __name__ == "__main__":
    run_tests()
