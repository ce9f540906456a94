import os
import unittest

import torch

from torch_testing_ext.common_distributed import MultiProcessTestCase, requires_gloo, skip_if_lt_x_gpu


class TestLeases(unittest.TestCase):
    def check(self, count):
        self.assertEqual(torch.accelerator.device_count(), count)
        mask = os.environ["TESTACC_VISIBLE_DEVICES"].split(",")
        self.assertEqual(mask if count else [], mask if mask != ["-1"] else [])
        self.assertEqual(len(set(mask)), max(count, 1))

    @skip_if_lt_x_gpu(1)
    def test_first(self):
        self.check(1)

    @skip_if_lt_x_gpu(1)
    def test_second(self):
        self.check(1)

    @skip_if_lt_x_gpu(2)
    def test_both(self):
        self.check(2)

    def test_none(self):
        self.check(0)

    @skip_if_lt_x_gpu(3)
    def test_three(self):
        self.fail("there are two")


class Ranks(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_a_device_for_each(self):
        self.assertEqual(torch.accelerator.device_count(), 2)
        torch.get_device_module().init()

    @requires_gloo()
    def test_on_the_cpu(self):
        self.assertEqual(torch.accelerator.device_count(), 0)


if __name__ == "__main__":
    unittest.main()
