import importlib
import pathlib
import sys
import unittest

RARE = "torch.utils.mobile_optimizer"
SEEN = pathlib.Path(__file__).with_name("seen")


class T(unittest.TestCase):
    def look(self):
        with SEEN.open("a") as seen:
            seen.write("there\n" if RARE in sys.modules else "not there\n")
        module = importlib.import_module(RARE)
        self.assertFalse(hasattr(module, "touched"))
        module.touched = True

    def test_one(self):
        self.look()

    def test_two(self):
        self.look()

    def test_three(self):
        self.look()
