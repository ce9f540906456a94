import os
import signal
import sys
import unittest

import torch

from torch_testing_ext import common_utils  # noqa: F401
from torch_testing_ext.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests


@instantiate_parametrized_tests
class TestGood(TestCase):
    @parametrize("x", [1, 2])
    def test_fine(self, x):
        print("fine", x, os.getpid())

    def test_random(self):
        print("random", torch.rand(1).item())

    def test_text(self):
        self.assertExpectedInline("new", """old""") if "accept" in str(sys.argv) else None


class TestBad(TestCase):
    @unittest.skipUnless(os.environ.get("BAD"), "only when asked for")
    def test_fails(self):
        here = "a local variable"  # noqa: F841
        print("bad", os.getpid())
        self.assertEqual(1, 2)

    @unittest.skipUnless(os.environ.get("INTERRUPT"), "only when asked for")
    def test_interrupted(self):
        os.kill(os.getpid(), signal.SIGINT)


class TestZLast(TestCase):
    def test_last(self):
        print("last")


if __name__ == "__main__":
    run_tests()
