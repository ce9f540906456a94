import sys
import unittest
from pathlib import Path

from torch_testing_ext.common_distributed import MultiProcessTestCase

from .helper import VALUE

NAME, EXPECTED = "name", "value"
# The folder of the topmost package, as pytest has it.
FIRST_IN_PATH = Path(__file__).parents[NAME.count(".")]


class Checks:
    def check(self):
        self.assertEqual(type(self).__module__, NAME)
        self.assertIs(sys.modules[NAME].Checks, Checks)
        self.assertEqual(VALUE, EXPECTED)


class PlainTest(Checks, unittest.TestCase):
    def test_plain(self):
        self.check()
        self.assertEqual(sys.path[0], str(FIRST_IN_PATH))


class RanksTest(Checks, MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_ranks(self):
        self.check()
