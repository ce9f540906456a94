import time
import unittest


class T(unittest.TestCase):
    @classmethod
    def tearDownClass(cls):
        cls.wait()

    @classmethod
    def wait(cls):
        time.sleep(600)

    def test_a(self):
        pass

    def test_b(self):
        pass


class Cleans(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.addClassCleanup(time.sleep, 600)

    def test_c(self):
        pass
