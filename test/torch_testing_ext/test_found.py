"""What our suites found in torch, kept in docs/found: it is still so. Where torch has mended it, its test fails as an
unexpected success: give the version here, and let the suites go where they had to make way for it."""

import runpy
import unittest
from pathlib import Path

import torch

from torch_testing_ext.common_distributed import MultiProcessTestCase
from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests

FOUND = Path(__file__).parents[2] / "docs" / "found"
# By the version of torch that has it right; None: none has.
MENDED_IN = {
    "argmax_of_columns": None,
    "cumsum_of_a_sharded_dim": (2, 14),
    "embedding_rank_without_rows": None,
    "gloo_second_wait": None,
    "mse_loss_of_uneven_shards": None,
}
# What shows in some runs only cannot be expected.
BY_CHANCE = {"gloo_abort_at_exit"}


MENDED = [name for name, version in MENDED_IN.items() if version and torch.__version__ >= version]


class TestFound(MultiProcessTestCase):
    """Each file runs in one rank, and forks the others that it needs: so it need not import torch."""

    world_size = 1

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_each_file_is_known_here(self):
        self.assertEqual({file.stem for file in FOUND.glob("*.py")} - BY_CHANCE, set(MENDED_IN))

    @parametrize("name", sorted(set(MENDED_IN) - set(MENDED)))
    @unittest.expectedFailure
    def test_is_right(self, name):
        self.check(name)

    def test_is_mended(self):
        for name in MENDED:
            self.check(name)

    def check(self, name):
        try:
            runpy.run_path(str(FOUND / f"{name}.py"), run_name="__main__")
        except SystemExit as leaving:
            self.assertFalse(leaving.code, "it is still wrong")


instantiate_parametrized_tests(TestFound)

if __name__ == "__main__":
    run_tests()
