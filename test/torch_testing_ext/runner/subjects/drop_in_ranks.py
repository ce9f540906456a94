import os

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.common_utils import run_tests


class RanksTest(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_sum(self):
        from torch.testing._internal import common_distributed

        self.assertTrue(issubclass(type(self), common_distributed.MultiProcessTestCase))
        store = dist.FileStore(self.file_name, 2)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=2)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        self.assertEqual(tensor.item(), 2)

    def test_one_rank_leaves(self):
        if self.rank == 1:
            os._exit(3)


if __name__ == "__main__":
    run_tests()
