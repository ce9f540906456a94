import os  # noqa: F401 (for what a test adds)
import sys

import torch
import torch.distributed as dist

from torch_testing_ext.common_distributed import MultiProcessTestCase
from torch_testing_ext.common_utils import run_tests

# more at import


class TestIt(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_passes(self):
        store = dist.FileStore(self.file_name, 2)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=2)
        dist.all_reduce(torch.ones(1))

    def test_fails_in_rank_1(self):
        print("rank", self.rank, "was here")
        print("and here", file=sys.stderr)
        if self.rank == 1:
            raise ValueError("on purpose")

    def test_breakpoint(self):
        answer = 42 + self.rank
        if self.rank == 1:
            breakpoint()
        self.assertEqual(answer, 42 + self.rank)


if __name__ == "__main__":
    run_tests()
