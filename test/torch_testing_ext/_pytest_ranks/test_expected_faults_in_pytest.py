"""Faults of tests that pytest runs in ranks: by the mark and by the decorator."""

import unittest

from kit.pytest_runs import run_pytest

from torch_testing_ext.common_utils import run_tests

FILE = """
import contextlib
import pytest
import torch
import torch.distributed as dist
from torch_testing_ext.common_distributed import MultiProcessTestCase
from torch_testing_ext.faults import call, calls, fault_point, fault_sweep, faults, incarnation, kill, mark
from torch_testing_ext.faults import reached, restart

def survive():
    dist.barrier()
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(1))

@pytest.mark.world_size(2)
@pytest.mark.faults(kill(1, at=call(2)), within=20)
def test_mark(dist_env):
    survive()

@pytest.mark.world_size(2)
@faults(kill(1, at=call(2)), within=20)
def test_decorator(dist_env):
    survive()

@pytest.mark.world_size(2)
@faults(kill(1, at=call(5)))
def test_never(dist_env):
    dist.barrier()

@pytest.mark.world_size(2)
@faults(kill(1, at=mark("there")), restart(1), must_reach=["again"])
def test_restart(ranks):
    fault_point("there")
    if incarnation():
        reached("again")

@pytest.mark.world_size(2, scope="module")
class TestShared:
    def test_before(self, dist_env):
        dist.barrier()

    @pytest.mark.faults(kill(1, at=call(2)), within=20)
    def test_dies(self, dist_env):
        survive()

    def test_after(self, dist_env):
        dist.barrier()

    @pytest.mark.faults(kill(1, at=call(2)), restart(1))
    def test_restart(self, dist_env):
        pass

@pytest.mark.world_size(2)
@fault_sweep(kill, at=calls(), within=20)
def test_sweep(dist_env):
    # A rank that dies before all are connected is not missed in a call.
    dist_env.store.set(f"rank {dist_env.rank}", "")
    dist_env.store.wait(["rank 0", "rank 1"])
    with contextlib.suppress(RuntimeError):
        dist.all_reduce(torch.ones(1))

@pytest.mark.world_size(2, scope="module")
@fault_sweep(kill, at=calls(), within=20)
def test_sweep_of_shared_ranks(dist_env):
    dist.barrier()

@pytest.mark.world_size(2)
@pytest.mark.faults(kill(2, at=call(1)))
def test_no_such_rank(dist_env):
    pass

@pytest.mark.world_size(2)
@pytest.mark.faults(kill(1))
def test_no_point(dist_env):
    pass

@pytest.mark.faults(kill(1, at=call(1)))
def test_no_ranks():
    pass

@faults(kill(1, at=call(1)))
def test_no_ranks_by_the_decorator():
    pass
"""
FAILED = {
    "test_sweep_of_shared_ranks": "2 of 2 faults fail this test; the first: kill(rank=0, at=call(1)) at barrier #1: ",
    "test_never": "kill(rank=1, at=call(5)) did not happen: rank 1 came to 1 collective call (in all: 1 barrier)",
    "TestShared.test_restart": "restart(1) needs ranks for each test, and scope is 'module'",
    "test_no_such_rank": "the test has 2 ranks; give a rank from 0 to 1",
    "test_no_point": "say which rank and where: kill(..., rank=1, at=call(3))",
    "test_no_ranks": "it has faults, but no ranks of the plugin. Mark it: @pytest.mark.world_size(2)",
    "test_no_ranks_by_the_decorator": "does not run in ranks that can die",
}


class FaultsInPytestTest(unittest.TestCase):
    def test_marks_and_decorators(self):
        run = run_pytest({"test_faults.py": FILE})
        failed = {name for name, outcome in run.outcomes.items() if outcome != "passed"}
        self.assertEqual({name.rpartition("::")[2] for name in failed}, set(FAILED), run.text)
        for name, text in FAILED.items():
            with self.subTest(name=name):
                self.assertIn(text, run.messages[name])
        self.assertEqual(len(run.outcomes), 14)


if __name__ == "__main__":
    run_tests()
