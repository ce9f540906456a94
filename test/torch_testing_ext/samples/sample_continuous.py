"""Persistent ranks, which run all tests of a class, written as in PyTorch's tree."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcContinuousTest, skip_if_lt_x_gpu
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests


class TestContinuous(MultiProcContinuousTest):
    world_size = 2
    timeout = timedelta(seconds=60)

    @classmethod
    def backend_str(cls):
        return "gloo"

    @classmethod
    def device_type(cls):
        return "cpu"

    @parametrize("size", [1, 3])
    def test_all_reduce(self, size):
        tensor = torch.full((size,), float(self.rank))
        dist.all_reduce(tensor, group=self.pg)
        self.assertEqual(tensor, torch.ones(size))

    def test_rank(self):
        self.assertEqual(dist.get_rank(), self.rank)
        self.assertEqual(os.environ["LOCAL_RANK"], str(self.rank))

    def test_same_numbers_everywhere(self):
        own = torch.rand(3)
        of_rank_0 = own.clone()
        dist.broadcast(of_rank_0, src=0)
        self.assertEqual(own, of_rank_0)

    @skip_if_lt_x_gpu(8)
    def test_skip(self): ...


instantiate_parametrized_tests(TestContinuous)


class TestDefaultBackend(MultiProcContinuousTest):
    """Names no backend, so that the group has one for each device."""

    @property
    def world_size(self):
        return 2

    def test_barrier(self):
        dist.barrier()


if __name__ == "__main__":
    run_tests()
