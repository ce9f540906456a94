# Owner(s): ["oncall: distributed"]

import itertools
import os

import torch.deep
from torch.deep import module, zebra
from torch.testing._internal.common_utils import run_tests, TestCase


class DeepTest(TestCase):
    def helper(self):
        return os.getpid()

    def test_there(self):
        self.assertTrue(module)

    def test_answer(self):
        # as it is known
        self.assertEqual(next(itertools.chain([module.ANSWER])), 42)


repeat(DeepTest)


class OtherTest(TestCase):
    """New here."""

    def test_other(self):
        self.assertTrue(zebra)


repeat(OtherTest)

if __name__ == "__main__":
    run_tests()
