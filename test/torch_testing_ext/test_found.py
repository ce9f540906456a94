"""What our suites found in torch, kept in docs/found: it is still so. Where torch has mended it, its test fails as an
unexpected success: give the version here, and let the suites go where they had to make way for it."""

import subprocess
import sys
import unittest
from pathlib import Path

import torch

from torch_testing_ext.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

FOUND = Path(__file__).parents[2] / "docs" / "found"
# By the version of torch that has it right; None: none has.
MENDED_IN = {
    "embedding_rank_without_rows": None,
    "gloo_second_wait": None,
}
# What shows in some runs only cannot be expected.
BY_CHANCE = {"gloo_abort_at_exit"}


def is_mended(name):
    return MENDED_IN[name] is not None and torch.__version__ >= MENDED_IN[name]


class TestFound(TestCase):
    def test_each_file_is_known_here(self):
        self.assertEqual({file.stem for file in FOUND.glob("*.py")} - BY_CHANCE, set(MENDED_IN))

    @parametrize("name", [name for name in MENDED_IN if not is_mended(name)])
    @unittest.expectedFailure
    def test_is_right(self, name):
        ended = subprocess.run([sys.executable, FOUND / f"{name}.py"], capture_output=True, text=True, timeout=120)
        if ended.returncode not in (0, 1):
            raise RuntimeError(f"{name} did neither: {ended.stderr}")
        self.assertEqual(ended.returncode, 0, ended.stdout)


instantiate_parametrized_tests(TestFound)

if __name__ == "__main__":
    run_tests()
