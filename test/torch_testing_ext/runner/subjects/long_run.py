import unittest

from torch_testing_ext.common_distributed import MultiProcessTestCase


class Alone(unittest.TestCase):
    def test_a(self):
        self.fail(f"begin {'x' * 1_000_000} end")


class OnRanks(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_b(self):
        self.fail(f"begin {'y' * 1_000_000} end")
