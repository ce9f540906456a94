import os
import subprocess
import time
import unittest

from torch_testing_ext.common_utils import timeout


class T(unittest.TestCase):
    def test_passes(self):
        print("hello from a node")

    def test_fails(self):
        self.assertEqual(1, 2)

    def test_errs(self):
        raise KeyError("x")

    def test_skips(self):
        self.skipTest("a reason")

    def test_dies(self):
        os.kill(os.getpid(), 9)

    def test_leaks(self):
        subprocess.Popen(["sleep", "1000"])

    @timeout(1)
    def test_hangs(self):
        time.sleep(1000)


class Shared(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.x = 1

    def test_1(self):
        pass

    def test_2(self):
        os._exit(3)

    def test_3(self):
        pass
