"""Ranks as threads, written as in PyTorch's tree."""

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiThreadedTestCase, spawn_threads_and_init_comms
from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests


class TestThreads(MultiThreadedTestCase):
    @property
    def world_size(self):
        return 3

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def perThreadSetUp(self):
        self.own = torch.full((2,), float(self.rank))

    def test_all_reduce(self):
        dist.all_reduce(self.own)
        self.assertEqual(self.own, torch.full((2,), 3.0))

    @parametrize("root", [0, 2])
    def test_broadcast(self, root):
        dist.broadcast(self.own, src=root)
        self.assertEqual(self.own, torch.full((2,), float(root)))

    def test_on_rank(self):
        self.assertEqualOnRank(self.rank, 1, rank=1)
        self.assertNotEqualOnRank(self.rank, 1, rank=0)

    def test_subgroup(self):
        group = dist.new_group([0, 2])
        if self.rank != 1:
            dist.all_reduce(self.own, group=group)
            self.assertEqual(self.own, torch.full((2,), 2.0))

    def test_skip(self):
        self.skipTest("on all ranks")


class TestDecorated(TestCase):
    @spawn_threads_and_init_comms
    def test_without_arguments(self):
        self.assertEqual(dist.get_world_size(), 4)

    @spawn_threads_and_init_comms(world_size=2)
    def test_with_arguments(self):
        ranks = [None, None]
        dist.all_gather_object(ranks, dist.get_rank())
        self.assertEqual(ranks, [0, 1])


instantiate_parametrized_tests(TestThreads)

if __name__ == "__main__":
    run_tests()
