import datetime

import torch.distributed as dist

from torch_testing_ext._torch.groups import process_groups
from torch_testing_ext.common_distributed import MultiProcessTestCase


class T(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_split(self):
        self.assertFalse(process_groups.made_groups_before())
        store = dist.FileStore(self.file_name, 2)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=2)
        self.assertTrue(process_groups.made_groups_before())
        part = dist.group.WORLD.split_group([self.rank], datetime.timedelta(seconds=60))
        self.assertEqual(part.size(), 1)
