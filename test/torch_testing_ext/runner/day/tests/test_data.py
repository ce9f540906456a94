from mylib import data

from torch_testing_ext.common_utils import TestCase, run_tests


class TinyTest(TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.data = data.load("tiny")

    def test_first(self):
        pass

    def test_second(self):
        pass

    def test_third(self):
        pass


class SmallTest(TestCase):
    def setUp(self):
        super().setUp()
        self.data = data.load("tiny")

    def test_first(self):
        pass

    def test_second(self):
        pass


if __name__ == "__main__":
    run_tests()
