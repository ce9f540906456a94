import pytest
import torch
import torch.distributed as dist

from torch_testing_ext.common_distributed import MultiProcessTestCase


class T(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_it(self):
        store = dist.FileStore(self.file_name, 2)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=2)
        cross()


def cross():
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    works = [dist.all_reduce(torch.ones(4), group=group, async_op=True) for group in groups[:: 1 - 2 * dist.get_rank()]]
    for work in works:
        work.wait()


@pytest.mark.world_size(2)
def test_marked(dist_env):
    cross()
