"""MultiProcContinuousTest: a class that inherits the tests of another one, whose ranks have ended.

Before torch 2.15, PyTorch sent the tests to the dead ranks, and hung.
"""

import torch
import torch.distributed as dist
from notes import note
from torch.testing._internal.common_distributed import MultiProcContinuousTest
from torch.testing._internal.common_utils import run_tests

NEWER = "2.15"


class BaseTest(MultiProcContinuousTest):
    world_size = 2

    @classmethod
    def backend_str(cls):
        return "gloo"

    @classmethod
    def device_type(cls):
        return "cpu"

    def test_group(self):
        note(self, dist.get_world_size(), self.rank)

    def test_collective(self):
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        note(self, tensor.item())

    def test_class(self):
        note(self, type(self).__name__)


class InheritsTest(BaseTest):
    def test_own(self):
        note(self, dist.get_world_size())


if __name__ == "__main__":
    run_tests()
