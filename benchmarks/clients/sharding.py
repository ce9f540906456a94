"""Tests of layouts on DTensor, as a library's authors write them."""

import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests
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

    @with_comms
    @parametrize("dim", [0, 1])
    def test_mean(self, dim):
        self.check(lambda x: x.mean(dim), Shard(dim), 6, 4)

    @with_comms
    @parametrize("keepdim", [False, True])
    def test_norm(self, keepdim):
        self.check(lambda x: x.norm(dim=1, keepdim=keepdim), Shard(0), 6, 4)

    @with_comms
    def test_layer_norm(self):
        self.check(lambda x: torch.nn.functional.layer_norm(x, (4,)), Shard(0), 6, 4)

    @with_comms
    def test_transposed(self):
        self.check(lambda x: x.t().contiguous(), Shard(1), 6, 4)

    @with_comms
    def test_redistribution(self):
        self.check(
            lambda x: x.redistribute(placements=[Replicate()]) if hasattr(x, "redistribute") else x, Shard(0), 6, 4
        )


instantiate_parametrized_tests(ShardingTest)

if __name__ == "__main__":
    run_tests()
