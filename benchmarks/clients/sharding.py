"""Tests of layouts on DTensor, as a library's authors write them."""

import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorTestBase, with_comms


class ShardingTest(DTensorTestBase):
    @property
    def world_size(self):
        return 2

    def check(self, act, placement, *shape):
        mesh = self.build_device_mesh()
        torch.manual_seed(0)
        whole = torch.randn(*shape)
        self.assertEqual(act(distribute_tensor(whole, mesh, [placement])).full_tensor(), act(whole))

    @with_comms
    def test_sum_of_rows(self):
        self.check(lambda x: x.sum(0), Shard(0), 6, 4)

    @with_comms
    def test_product(self):
        self.check(lambda x: x @ x.t(), Shard(0), 6, 4)

    @with_comms
    def test_softmax(self):
        self.check(lambda x: x.softmax(-1), Shard(0), 6, 4)

    @with_comms
    def test_replicated(self):
        self.check(lambda x: x.relu() + 1, Replicate(), 6, 4)

    @with_comms
    def test_uneven_rows(self):
        self.check(lambda x: x * 2, Shard(0), 5, 4)


if __name__ == "__main__":
    run_tests()
