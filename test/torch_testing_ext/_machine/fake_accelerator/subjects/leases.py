"""What tests have of fake accelerators: run by the runner on 0 and 2 of three, with --ranks-per-gpu=2."""

import os
import unittest

import torch
import torch.distributed as dist

from torch_testing_ext.common_distributed import DistributedTestBase, skip_if_lt_x_gpu
from torch_testing_ext.ranks import run_script, spawn

COUNT = "import torch; assert torch.accelerator.device_count() == {}"


def uuids():
    properties = map(torch.fakeacc.get_device_properties, range(torch.accelerator.device_count()))
    return [device.uuid for device in properties]


def has_devices(rank, count):
    assert torch.accelerator.device_count() == count
    torch.ones(1, device=torch.device("fakeacc", rank) if count else "cpu")


class UnitTest(unittest.TestCase):
    """Each test is a unit; the first two end only if they run at once."""

    @skip_if_lt_x_gpu(1)
    def test_first(self):
        (mine,) = uuids()
        with open("of_first", "w") as fifo:
            fifo.write(mine)
        with open("of_second") as fifo:
            self.assertEqual({mine, fifo.read()}, {"fake-0000", "fake-0002"})
        torch.ones(1, device="fakeacc")

    @skip_if_lt_x_gpu(1)
    def test_second(self):
        (mine,) = uuids()
        with open("of_first") as fifo:
            self.assertNotEqual(mine, fifo.read())
        with open("of_second", "w") as fifo:
            fifo.write(mine)
        torch.ones(1, device="fakeacc")

    @skip_if_lt_x_gpu(2)
    def test_ranks_have_what_the_test_has_leased(self):
        spawn(has_devices, 2, 2)
        self.run_count(2, devices=2)

    def test_ranks_of_a_test_without_needs_have_nothing(self):
        spawn(has_devices, 2, 0)
        self.run_count(0)
        with self.assertRaises(unittest.SkipTest):
            spawn(has_devices, 1, 1, devices=1)

    def run_count(self, count, **devices):
        name = f"count_{count}.py"
        with open(name, "w") as file:
            file.write(COUNT.format(count))
        run_script(name, world_size=2, **devices)
        os.unlink(name)

    @skip_if_lt_x_gpu(5)
    def test_more_than_ranks_can_share(self):
        self.fail("there are two, for four ranks")


class SharingTest(DistributedTestBase):
    @property
    def world_size(self):
        return 4

    @skip_if_lt_x_gpu(4)
    def test_four_ranks_on_two(self):
        self.assertEqual(uuids(), ["fake-0000", "fake-0002"])
        self.create_pg("fakeacc")
        tensor = torch.ones(3, device=torch.device("fakeacc", self.rank % 2))
        dist.all_reduce(tensor)
        self.assertEqual((tensor.tolist(), dist.get_backend()), ([4.0] * 3, "fakeccl"))
        dist.destroy_process_group()
