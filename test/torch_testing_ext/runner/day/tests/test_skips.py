import unittest

from torch_testing_ext.common_utils import TestCase, run_tests


class SkipTest(TestCase):
    def test_later(self):
        raise unittest.SkipTest("not ready")


if __name__ == "__main__":
    run_tests()
