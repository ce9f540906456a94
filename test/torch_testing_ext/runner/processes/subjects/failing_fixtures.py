import os
import unittest


class Before(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        raise ValueError("cannot begin")

    def test_a(self):
        pass

    def test_b(self):
        pass


class After(unittest.TestCase):
    @classmethod
    def tearDownClass(cls):
        raise ValueError("cannot end")

    def test_c(self):
        pass

    def test_d(self):
        pass


class Skips(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        raise unittest.SkipTest("none today")

    def test_e(self):
        pass


class Dies(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        os._exit(4)

    def test_f(self):
        pass

    def test_g(self):
        pass
