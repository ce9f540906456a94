import os

import torch.distributed as dist

from torch_testing_ext.common_distributed import MultiProcessTestCase

SIZE = int(os.environ.get("SIZE", "4"))


class RanksTestCase(MultiProcessTestCase):
    world_size = SIZE

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def join(self):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
