"""Ranks of pytest tests, of `spawn` and of a launcher under the sanitizer: by settings, by option, by decorator."""

from __future__ import annotations

import tempfile
from pathlib import Path

from kit.pytest_runs import PytestCase, run_pytest, run_under_torchrun

from torch_testing_ext.common_utils import run_tests

HEAD = """
import pytest, torch
import torch.distributed as dist
from torch_testing_ext.common_distributed import DistributedTestBase, MultiProcContinuousTest, sanitize
from torch_testing_ext.ranks import spawn

def reduce_differently():
    dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX if dist.get_rank() else dist.ReduceOp.SUM)

def reduce_nan():
    dist.all_reduce(torch.full((4,), float("nan") if dist.get_rank() else 0.0))

def cross():
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    works = [dist.all_reduce(torch.ones(4), group=group, async_op=True) for group in groups[:: 1 - 2 * dist.get_rank()]]
    for work in works:
        work.wait()
"""
MARKED = """
@pytest.mark.world_size(2)
def test_op(dist_env):
    reduce_differently()

@pytest.mark.world_size(2)
@sanitize("nan")
def test_nan(dist_env):
    reduce_nan()

@pytest.mark.world_size(2)
def test_passes(dist_env):
    dist.all_reduce(torch.ones(4))
"""
IN_PLACE = """
class FreshTest(DistributedTestBase):
    world_size = 2

    def test_op(self):
        self.create_pg("cpu")
        reduce_differently()

    @sanitize("nan")
    def test_nan(self):
        self.create_pg("cpu")
        reduce_nan()

    def test_passes(self):
        self.create_pg("cpu")
        dist.all_reduce(torch.ones(4))

@sanitize("order")
class PersistentTest(MultiProcContinuousTest):
    world_size = 2

    def test_op(self):
        reduce_differently()

    def test_order(self):
        cross()

    def test_passes(self):
        dist.all_reduce(torch.ones(4))
"""
SPAWNED = """
def differently(rank):
    dist.init_process_group("gloo")
    reduce_differently()

@sanitize("nan")
def nan(rank):
    dist.init_process_group("gloo")
    reduce_nan()

def crossed(rank):
    dist.init_process_group("gloo")
    cross()

def test_spawned_op():
    spawn(differently, 2)

def test_spawned_nan():
    spawn(nan, 2)

def test_spawned_crossed():
    spawn(crossed, 2)
"""
BY_OP, BY_NAN = "max in call #1 of the default group", "rank 1: 4 NaN of 4 elements enter all_reduce"


class SanitizedRanksTest(PytestCase):
    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)

    def test_decorators_without_settings(self) -> None:
        run = run_pytest({"test_x.py": HEAD + MARKED, "test_y.py": HEAD + SPAWNED})
        passed = dict.fromkeys(("test_op", "test_passes", "test_spawned_op", "test_spawned_crossed"), "passed")
        self.assertOutcomes(run, {**passed, "test_nan": "failed", "test_spawned_nan": "failed"})
        for name in ("test_nan", "test_spawned_nan"):
            self.assertIn(BY_NAN, run.messages[name])

    def test_settings(self) -> None:
        files = {"test_x.py": HEAD + MARKED, "test_y.py": HEAD + SPAWNED}
        tests = ("test_x.py::test_op", "test_y.py::test_spawned_op", "test_y.py::test_spawned_crossed")
        run = run_pytest(files, *tests, "--sanitize", TORCH_TESTING_EXT_SHAKE="7")
        self.assertOutcomes(run, {"test_op": "failed", "test_spawned_op": "failed", "test_spawned_crossed": "passed"})
        for name in ("test_op", "test_spawned_op"):
            self.assertIn(BY_OP, run.messages[name])
            self.assertIn("max", run.messages[name])
            self.assertIn("The ranks were delayed with the seed 7", run.messages[name])
        # What is to be known of a test that passes is not hidden with its output.
        self.assertRegex(run.text, "RankWarning: .*issue collectives in opposite orders")

    def test_ranks_of_a_launcher(self) -> None:
        """Each decorator has its effect, and on its test only."""
        run = run_under_torchrun(
            self.folder, HEAD + MARKED + IN_PLACE, TORCH_TESTING_EXT_SHAKE="7", TORCH_TESTING_EXT_SANITIZE_ORDER="fail"
        )
        expected = {
            "test_op": "passed",
            "test_nan": "failed",
            "test_passes": "passed",
            "FreshTest.test_op": "passed",
            "FreshTest.test_nan": "failed",
            "FreshTest.test_passes": "passed",
            "PersistentTest.test_op": "failed",
            "PersistentTest.test_order": "failed",
            "PersistentTest.test_passes": "passed",
        }
        self.assertOutcomes(run, expected)
        for name in ("test_nan", "FreshTest.test_nan"):
            self.assertIn(BY_NAN, run.messages[name])
        self.assertIn(BY_OP, run.messages["PersistentTest.test_op"])
        self.assertIn("issue collectives in opposite orders", run.messages["PersistentTest.test_order"])
        self.assertIn("The ranks were delayed with the seed 7", run.messages["PersistentTest.test_op"])
        self.assertEqual([*self.folder.glob("**/*.sanitizer")], [])


if __name__ == "__main__":
    run_tests()
