"""Ordinary training loops give the same numbers by the engine as under DDP, whatever Python state they read."""

import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from loops import LOOPS, ByEngine, Parallel

from torch_testing_ext._spmd import roster, state_engine
from torch_testing_ext._spmd.roster import EARLY
from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorContinuousTestBase

leaves = torch.utils._pytree.tree_leaves


class TestLoops(DTensorContinuousTestBase):
    """All loops, on two persistent ranks."""

    world_size = 2

    @parametrize("style, early", [("replicate", EARLY), ("fully_shard", EARLY), ("fully_shard", 0), ("fully_shard", 2)])
    @parametrize("name", [*LOOPS])
    def test_equals_ddp(self, name, style, early):
        compare(self, name, style, early)


class TestOneRank(DTensorContinuousTestBase):
    """One rank averages nothing, and keeps gradients as others do."""

    world_size = 1

    def test_equals_ddp(self):
        compare(self, "gradients_for_another_step", "fully_shard", 0)


def compare(test, name, style, early, loops=LOOPS):
    """Run a loop under DDP and by the engine, and compare all that it returns."""
    torch.manual_seed(test.rank)
    expected = loops[name](Parallel(test.rank))
    torch.manual_seed(test.rank)
    with mock.patch.object(roster, "EARLY", early), mock.patch.object(state_engine, "EARLY", early):
        found = loops[name](ByEngine(test.rank, style))
    mine, theirs = (
        [getattr(leaf, "full_tensor", lambda leaf=leaf: leaf)() for leaf in leaves(each)] for each in (found, expected)
    )
    test.assertEqual(len(mine), len(theirs))
    for number, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        test.assertEqual(one, other, rtol=1e-5, atol=1e-6, msg=f"{name}, rank {test.rank}: value {number}")


instantiate_parametrized_tests(TestLoops)

if __name__ == "__main__":
    run_tests()
