import os
import sys
import unittest

from torch_testing_ext.common_distributed import MultiProcessTestCase

from .helper import VALUE

NAME, EXPECTED = "name", "value"


class Checks:
    def check(self):
        self.assertEqual(type(self).__module__, NAME)
        self.assertIs(sys.modules[NAME].Checks, Checks)
        self.assertEqual(VALUE, EXPECTED)


class PlainTest(Checks, unittest.TestCase):
    def test_plain(self):
        self.check()
        self.assertEqual(sys.path[0], os.path.dirname(__file__))


class RanksTest(Checks, MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_ranks(self):
        self.check()
