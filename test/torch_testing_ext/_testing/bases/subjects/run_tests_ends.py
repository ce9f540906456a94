import atexit
import os
import sys
import unittest

from torch_testing_ext.common_utils import TestCase, run_tests

WHERE, HOW = sys.argv.pop(), sys.argv.pop()


def end(where):
    if where == WHERE:
        {"exit": lambda: os._exit(0), "leave": lambda: sys.exit(0), "become": lambda: os.execlp("true", "true")}[HOW]()


class First(TestCase):
    @classmethod
    def setUpClass(cls):
        end("setUpClass")

    @classmethod
    def tearDownClass(cls):
        end("tearDownClass")

    def test_a(self):
        end("test_a")
        self.addClassCleanup(end, "class cleanup")
        unittest.addModuleCleanup(end, "module cleanup")
        if WHERE == "child" and os.fork() == 0:
            os._exit(0)
        atexit.register(end, "atexit")
        self.assertNotEqual(WHERE, "atexit")


class Second(TestCase):
    def test_b(self):
        pass


def setUpModule():
    end("setUpModule")


def tearDownModule():
    end("tearDownModule")


if __name__ == "__main__":
    run_tests()
