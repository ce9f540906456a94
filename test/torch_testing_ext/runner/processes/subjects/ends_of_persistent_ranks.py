import os
import time

import torch.distributed as dist

from torch_testing_ext._testing.bases import continuous
from torch_testing_ext.common_distributed import MultiProcContinuousTest

continuous.LEAVE_TIMEOUT = 1.0


class Base(MultiProcContinuousTest):
    world_size = 2
    fast_exit = False

    @classmethod
    def device_type(cls):
        return "cpu"

    @classmethod
    def backend_str(cls):
        return "gloo"


class Exits(Base):
    @classmethod
    def tearDownClass(cls):
        os._exit(0)

    def test_a(self):
        pass


class Hangs(Base):
    def test_b(self):
        if self.rank == 1:
            dist.destroy_process_group = lambda: time.sleep(600)


class RankExits(Base):
    @classmethod
    def tearDownClass(cls):
        pass

    def test_c(self):
        if self.rank == 1:
            dist.destroy_process_group = lambda: os._exit(0)
