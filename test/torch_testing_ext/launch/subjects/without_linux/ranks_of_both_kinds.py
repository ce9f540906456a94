import pytest
import torch
import torch.distributed as dist

from torch_testing_ext.common_distributed import MultiProcessTestCase


class ReduceTest(MultiProcessTestCase):
    @property
    def world_size(self):
        return 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def join(self):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)

    def test_sum(self):
        self.join()
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        self.assertEqual(tensor.item(), 2)

    def test_one_leaves(self):
        self.join()
        if self.rank == 0:
            dist.all_reduce(torch.ones(1))


@pytest.mark.world_size(2)
def test_marked(dist_env):
    pass
