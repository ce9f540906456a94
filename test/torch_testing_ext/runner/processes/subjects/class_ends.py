import os
import signal
import sys
import unittest


class Exits(unittest.TestCase):
    @classmethod
    def tearDownClass(cls):
        print("the last words of the class")
        os._exit(0)

    def test_a1(self):
        pass

    def test_a2(self):
        pass


class Leaves(unittest.TestCase):
    @classmethod
    def tearDownClass(cls):
        sys.exit(0)

    def test_b(self):
        pass


class Interrupts(unittest.TestCase):
    @classmethod
    def tearDownClass(cls):
        raise KeyboardInterrupt

    def test_c(self):
        pass


class IsKilled(unittest.TestCase):
    @classmethod
    def tearDownClass(cls):
        os.kill(os.getpid(), signal.SIGKILL)

    def test_d(self):
        pass


class BecomesAnother(unittest.TestCase):
    @classmethod
    def tearDownClass(cls):
        os.execv("/bin/true", ["true"])

    def test_e(self):
        pass


class Cleans(unittest.TestCase):
    def test_f(self):
        self.addClassCleanup(os._exit, 0)


class Skips(unittest.TestCase):
    @classmethod
    def tearDownClass(cls):
        raise unittest.SkipTest("its tests are over")

    def test_g(self):
        pass
