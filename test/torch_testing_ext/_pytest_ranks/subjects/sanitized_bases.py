import torch
import torch.distributed as dist
from failing_collectives import cross, reduce_differently, reduce_nan

from torch_testing_ext.common_distributed import DistributedTestBase, MultiProcContinuousTest, sanitize


class FreshTest(DistributedTestBase):
    world_size = 2

    def test_op(self):
        self.create_pg("cpu")
        reduce_differently()

    @sanitize("nan")
    def test_nan(self):
        self.create_pg("cpu")
        reduce_nan()

    def test_passes(self):
        self.create_pg("cpu")
        dist.all_reduce(torch.ones(4))


@sanitize("order")
class PersistentTest(MultiProcContinuousTest):
    world_size = 2

    def test_op(self):
        reduce_differently()

    def test_order(self):
        cross()

    def test_passes(self):
        dist.all_reduce(torch.ones(4))
