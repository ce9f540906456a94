"""What each rank sees: its variables, its device, and NCCL under each of its names."""

import os

import torch
import torch.distributed as dist

from torch_testing_ext.common_distributed import DistributedTestBase, MultiProcessTestCase, skip_if_lt_x_gpu
from torch_testing_ext.common_utils import run_tests

NAMES = ("nccl", "nccl2", "nccl-legacy", "nccl-lazy")


class Bound(DistributedTestBase):
    world_size = 1

    @skip_if_lt_x_gpu(1)
    def test_variables(self):
        found = {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
        expected = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        self.assertEqual(found, expected)
        self.assertTrue(os.environ.get("MASTER_ADDR"))
        self.assertTrue(os.environ["MASTER_PORT"].isdecimal())

    @skip_if_lt_x_gpu(1)
    def test_env_rendezvous(self):
        torch.cuda.set_device(0)
        dist.init_process_group("nccl")  # by env://
        ours = torch.ones(2, device="cuda")
        dist.all_reduce(ours)
        self.assertEqual(ours.cpu(), torch.ones(2))

    @skip_if_lt_x_gpu(1)
    def test_only_the_leased_device(self):
        self.assertEqual(torch.cuda.device_count(), len(os.environ["CUDA_VISIBLE_DEVICES"].split(",")))


class Both(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    @skip_if_lt_x_gpu(2)
    def test_devices_of_two_ranks(self):
        count = torch.cuda.device_count()
        torch.cuda.set_device(self.rank)
        self.assertEqual(torch.cuda.current_device(), self.rank % count)
        self.assertEqual(os.environ["LOCAL_RANK"], str(self.rank))


def _under(name):
    @skip_if_lt_x_gpu(1)
    def test(self):
        if not dist.is_backend_available(name):
            self.skipTest(f"this torch has no backend {name}")
        self.create_pg("cuda", backend=name)
        ours = torch.ones(2, device="cuda")
        dist.all_reduce(ours)
        self.assertEqual(ours.cpu(), torch.ones(2))
        self.assertEqual(ours.device.index, 0)

    return test


for _name in NAMES:
    setattr(Bound, f"test_{_name.replace('-', '_')}", _under(_name))


if __name__ == "__main__":
    run_tests()
