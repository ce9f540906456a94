"""Ranks that stay for all tests of a class, with their process group: faster, but the tests share them.

Run it: python examples/test_persistent.py
"""

import torch
import torch.distributed as dist

from torch_testing_ext.common_distributed import MultiProcContinuousTest
from torch_testing_ext.common_utils import run_tests


class PersistentTest(MultiProcContinuousTest):
    world_size = 2

    @classmethod
    def backend_str(cls):
        return "gloo"

    def test_all_reduce(self):
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        self.assertEqual(tensor, torch.full((2,), 2.0))

    def test_gather(self):
        everyones = [torch.zeros(1) for _ in range(self.world_size)]
        dist.all_gather(everyones, torch.tensor([float(self.rank)]))
        self.assertEqual(everyones, [torch.tensor([0.0]), torch.tensor([1.0])])


if __name__ == "__main__":
    run_tests()
