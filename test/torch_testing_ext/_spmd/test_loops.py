"""Ordinary training loops give the same numbers by the engine as under DDP, whatever Python state they read."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from loop_comparison import compare
from loops import LOOPS

from torch_testing_ext._spmd.roster import EARLY
from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorContinuousTestBase


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


instantiate_parametrized_tests(TestLoops)

if __name__ == "__main__":
    run_tests()
