"""Tests of which half need accelerators, as on a developer's laptop."""

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase, skip_if_lt_x_gpu
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests


class MixedTest(MultiProcessTestCase):
    @property
    def world_size(self):
        return 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def init(self, backend):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world_size)

    @parametrize("dtype", [torch.float32, torch.int64, torch.bool])
    def test_max(self, dtype):
        self.init("gloo")
        tensor = torch.ones(2, dtype=torch.uint8 if dtype is torch.bool else dtype) * self.rank
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        self.assertEqual(tensor.sum().item(), 2)

    @parametrize("size", [(), (1,), (0,), (3, 2)])
    def test_min_of_shapes(self, size):
        self.init("gloo")
        tensor = torch.full(size, float(self.rank))
        dist.all_reduce(tensor, dist.ReduceOp.MIN)
        self.assertEqual(tensor, torch.zeros(size))

    @skip_if_lt_x_gpu(2)
    @parametrize("count", [1, 10, 100, 1000, 10_000, 100_000, 1_000_000])
    def test_sum_on_devices(self, count):
        self.init("nccl")
        tensor = torch.ones(count, device=f"cuda:{self.rank}")
        dist.all_reduce(tensor)
        self.assertEqual(tensor, torch.full_like(tensor, 2.0))


instantiate_parametrized_tests(MixedTest)

if __name__ == "__main__":
    run_tests()
