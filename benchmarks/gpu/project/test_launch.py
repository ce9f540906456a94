"""Many small tests of one rank: on a GPU with fresh and with persistent ranks, and on the CPU."""

import torch
import torch.distributed as dist

from torch_testing_ext.common_distributed import MultiProcContinuousTest, MultiProcessTestCase, skip_if_lt_x_gpu
from torch_testing_ext.common_utils import run_tests

TESTS = 10


class Fresh(MultiProcessTestCase):
    world_size = 1

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def reduce(self, backend, device):
        store = dist.FileStore(self.file_name, 1)
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        ours = torch.ones(8, device=device)
        dist.all_reduce(ours)
        self.assertEqual(ours.sum().item(), 8)

    def test_cpu(self):
        self.reduce("gloo", "cpu")


class Persistent(MultiProcContinuousTest):
    world_size = 1

    @classmethod
    def backend_str(cls):
        return "nccl"

    def reduce(self):
        ours = torch.ones(8, device="cuda")
        dist.all_reduce(ours)
        self.assertEqual(ours.sum().item(), 8)


for number in range(TESTS):
    setattr(Fresh, f"test_fresh_{number}", skip_if_lt_x_gpu(1)(lambda self: self.reduce("nccl", "cuda:0")))
    setattr(Persistent, f"test_persistent_{number}", skip_if_lt_x_gpu(1)(lambda self: self.reduce()))


if __name__ == "__main__":
    run_tests()
