"""A script for torchrun in ranks; with launcher="torchrun", torchrun itself starts them, which takes seconds.

Run it: python -m unittest examples/test_launcher.py
"""

import unittest
from pathlib import Path

from torch_testing_ext.ranks import run_script


class LauncherTest(unittest.TestCase):
    def test_every_rank_fits_the_same(self):
        run = run_script(Path(__file__).parent / "train.py", world_size=2)
        self.assertEqual(run.outputs, ("fitted 0.500\n", "fitted 0.500\n"))


if __name__ == "__main__":
    unittest.main()
