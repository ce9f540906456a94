import time
import unittest


class T(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.wait()

    @classmethod
    def wait(cls):
        time.sleep(600)

    def test_a(self):
        pass

    def test_b(self):
        pass

    def test_c(self):
        pass


class Other(unittest.TestCase):
    def test_d(self):
        pass
