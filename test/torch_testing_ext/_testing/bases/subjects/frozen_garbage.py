import gc
import os

import torch

if "FREEZE" in os.environ:
    gc.freeze()
frozen = gc.get_freeze_count()
from torch_testing_ext.common_utils import TestCase, run_tests

assert bool(gc.get_freeze_count()) == bool(frozen)  # some of them may have gone
assert gc.isenabled()


class InACycle:
    def __init__(self, name):
        self.name, self.itself = name, self

    def __del__(self):
        os.write(1, (self.name + " collected\n").encode())


InACycle("made at import")


class TestGarbage(TestCase):
    def test_a_made(self):
        self.kept = torch.ones(3)
        self.assertTrue(any(value is self for value in gc.get_objects()))
        self.assertTrue(gc.is_tracked(self))
        InACycle("made by a test")

    def test_b_collected_by_the_test(self):
        InACycle("another")
        os.write(1, b"collects\n")
        gc.collect()
        os.write(1, b"has collected\n")
        InACycle("left to the end")


if __name__ == "__main__":
    run_tests()
