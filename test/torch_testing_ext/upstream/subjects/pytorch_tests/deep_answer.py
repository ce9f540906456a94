# Owner(s): ["oncall: distributed"]
# In PyTorch: test/distributed/test_deep.py

import itertools

import torch.deep
from torch.deep import module, zebra
from torch.testing._internal.common_utils import run_tests, TestCase


class DeepTest(TestCase):
    world_size = 2

    def helper(self):
        return module.ANSWER

    def test_answer(self):
        # as it is known
        self.assertEqual(next(itertools.chain([module.ANSWER])), 42)


class OtherTest(TestCase):
    """New here."""

    def test_other(self):
        self.assertTrue(zebra)


repeat(DeepTest)
repeat(OtherTest)

if __name__ == "__main__":
    run_tests()
