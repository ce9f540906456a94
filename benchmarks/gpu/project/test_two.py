"""Two ranks with a GPU each, and two tests with a GPU each that meet."""

import os
import time
import unittest
from pathlib import Path

import torch
import torch.distributed as dist
from gpu_support import check_collectives

from torch_testing_ext.common_distributed import DistributedTestBase, MultiProcContinuousTest, skip_if_lt_x_gpu
from torch_testing_ext.common_utils import run_tests


def uuid_of_device():
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


class Two(DistributedTestBase):
    world_size = 2

    @skip_if_lt_x_gpu(2)
    def test_distinct_devices(self):
        self.create_pg("cuda")
        uuids = [None, None]
        dist.all_gather_object(uuids, uuid_of_device())
        self.assertEqual(len(set(uuids)), 2)
        self.assertEqual(torch.cuda.current_device(), self.rank)

    @skip_if_lt_x_gpu(2)
    def test_collectives(self):
        self.create_pg("cuda")
        self.assertIn("nccl", dist.get_backend())
        check_collectives(self)


class Persistent(MultiProcContinuousTest):
    world_size = 2

    @classmethod
    def backend_str(cls):
        return "nccl"

    @skip_if_lt_x_gpu(2)
    def test_persistent(self):
        """The base selects the device of each rank."""
        self.assertEqual(torch.cuda.current_device(), dist.get_rank())
        check_collectives(self)


class Meet(unittest.TestCase):
    """Each passes only while the other runs."""

    def meet(self, own, other):
        folder = Path(os.environ["GPU_CHECK_MEETING"])
        (folder / f"{own}.draft").write_text(uuid_of_device())
        (folder / f"{own}.draft").rename(folder / f"{own}.uuid")
        until = time.monotonic() + 30
        while not (folder / f"{other}.uuid").exists():
            self.assertLess(time.monotonic(), until, "the other test has not begun")
            time.sleep(0.02)

    @skip_if_lt_x_gpu(1)
    def test_first_meets(self):
        self.meet("first", "second")

    @skip_if_lt_x_gpu(1)
    def test_second_meets(self):
        self.meet("second", "first")


if __name__ == "__main__":
    run_tests()
