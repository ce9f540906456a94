"""Classes with fixtures, whose tests run in one process."""

import os
import unittest


class SharedTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.pid = os.getpid()

    def test_first(self):
        self.assertEqual(os.getpid(), self.pid)

    def test_second(self):
        self.assertEqual(os.getpid(), self.pid)


class DyingTest(unittest.TestCase):
    """The tests after one that ends the process still run."""

    @classmethod
    def setUpClass(cls):
        cls.ready = True

    def test_a_passes(self):
        self.assertTrue(self.ready)

    def test_b_exits(self):
        os._exit(7)

    def test_c_passes(self):
        self.assertTrue(self.ready)


class BrokenFixtureTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        raise LookupError("the fixture is not there")

    def test_needs_it(self):
        self.fail("it ran without its fixture")


class SkippedFixtureTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        raise unittest.SkipTest("the fixture does not want to")

    def test_needs_it(self):
        self.fail("it ran without its fixture")
