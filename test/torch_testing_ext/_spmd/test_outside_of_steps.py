"""Models are used between calls of their step, and teachers in it, with the numbers of DDP."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from alias_loops import LOOPS as ALIASES
from outside_loops import LOOPS, TEACHERS
from test_loops import compare

from torch_testing_ext._spmd.roster import EARLY
from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorContinuousTestBase


class TestOutsideOfSteps(DTensorContinuousTestBase):
    """Models are used between calls, on two persistent ranks."""

    world_size = 2

    @parametrize("style, early", [("replicate", EARLY), ("fully_shard", EARLY), ("fully_shard", 0)])
    @parametrize("name", [*LOOPS])
    def test_equals_ddp(self, name, style, early):
        compare(self, name, style, early, LOOPS)


class TestTeachers(DTensorContinuousTestBase):
    """Teachers in the step, on three ranks, of which the last has no rows of some parameters."""

    world_size = 3

    @parametrize("style, early", [("replicate", EARLY), ("fully_shard", EARLY), ("fully_shard", 0)])
    @parametrize("name", [*TEACHERS])
    def test_equals_ddp(self, name, style, early):
        compare(self, name, style, early, TEACHERS)


class TestAliases(DTensorContinuousTestBase):
    """Something else shares memory with a parameter or a gradient, on two ranks."""

    world_size = 2

    @parametrize("style, early", [("replicate", EARLY), ("fully_shard", EARLY), ("fully_shard", 0)])
    @parametrize("name", [*ALIASES])
    def test_equals_ddp(self, name, style, early):
        compare(self, name, style, early, ALIASES)


instantiate_parametrized_tests(TestAliases)
instantiate_parametrized_tests(TestOutsideOfSteps)
instantiate_parametrized_tests(TestTeachers)

if __name__ == "__main__":
    run_tests()
