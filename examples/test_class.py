"""A test class whose methods run in four fresh ranks. To see how a failure reads, change 6.0 to 7.0.

Run it: python examples/test_class.py
"""

import torch
import torch.distributed as dist

from torch_testing_ext.common_distributed import MultiProcessTestCase
from torch_testing_ext.common_utils import run_tests


class ReduceTest(MultiProcessTestCase):
    world_size = 4

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_all_reduce(self):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
        tensor = torch.full((3,), float(self.rank))
        dist.all_reduce(tensor)
        self.assertEqual(tensor, torch.full((3,), 6.0))


if __name__ == "__main__":
    run_tests()
