import os
import unittest

from torch_testing_ext._testing.marks.needs import Skipped, too_few_devices
from torch_testing_ext.common_distributed import MultiProcessTestCase


class T(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_passes(self):
        print("rank", self.rank)

    def test_fails(self):
        self.assertEqual(self.rank, 0)

    def test_raises(self):
        raise ValueError("in a rank")

    def test_crashes(self):
        os._exit(3)

    def test_skips(self):
        self.skipTest("in every rank")

    def test_wants(self):
        raise Skipped(too_few_devices(4))

    @unittest.expectedFailure
    def test_fails_as_expected(self):
        self.fail()
