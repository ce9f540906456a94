import time
import unittest

from torch_testing_ext.common_distributed import MultiProcessTestCase


class T(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_ranks(self):
        if self.rank == 0:
            self.wait_for_the_other()

    def wait_for_the_other(self):
        print("rank 0 waits")
        time.sleep(600)


class P(unittest.TestCase):
    def test_alone(self):
        print("alone")
        self.wait_for_ever()

    def wait_for_ever(self):
        time.sleep(600)
