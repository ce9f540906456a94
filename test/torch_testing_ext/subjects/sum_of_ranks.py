import torch.distributed as dist

from torch_testing_ext.common_distributed import MultiProcessTestCase


class SumTest(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_right(self):
        dist.init_process_group("gloo", store=dist.FileStore(self.file_name, 2), rank=self.rank, world_size=2)
        dist.destroy_process_group()

    def test_wrong(self):
        self.assertEqual(self.rank, 0)
