"""Random training programs: the compiled step does what the eager step does under DDP or FSDP2, or is refused.

In CI the programs are always the same. To search for others:

    SPMD_SEARCH=2000 python test/distributed/_spmd/test_spmd_properties.py
"""

import os

from hypothesis import HealthCheck, Phase, Verbosity
from spmd_programs import training_programs
from spmd_truth import INVALID, REFUSED, RIGHT, check

from torch_testing_ext.common_distributed import MultiProcessTestCase, requires_gloo
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.hypothesis_utils import assume, given, settings

COUNT = int(os.environ.get("SPMD_SEARCH", "0"))
PROFILE = settings(
    max_examples=COUNT or 8,
    derandomize=not COUNT,
    database=None,
    phases=[Phase.generate, Phase.shrink] if COUNT else [Phase.generate],  # to shrink a program takes minutes
    suppress_health_check=list(HealthCheck),
    verbosity=Verbosity.normal,
)


class ProgramsTestCase(MultiProcessTestCase):
    """Runs programs in all ranks. A program of the mainstream must not be refused."""

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def check(self, program):
        outcome = check(program)
        assume(outcome.kind != INVALID)
        allowed = (RIGHT, REFUSED) if program.odd else (RIGHT,)
        self.assertIn(outcome.kind, allowed, f"{outcome}")


@requires_gloo()
class TestProgramsOnTwoRanks(ProgramsTestCase):
    world_size = 2

    @PROFILE
    @given(program=training_programs())
    def test_right_or_refused(self, program):
        self.check(program)

    @settings(PROFILE, max_examples=COUNT or 6)
    @given(program=training_programs(max_odd=0))
    def test_mainstream_is_right(self, program):
        self.check(program)


@requires_gloo()
class TestProgramsOnFourRanks(ProgramsTestCase):
    world_size = 4

    @settings(PROFILE, max_examples=COUNT or 3)
    @given(program=training_programs())
    def test_right_or_refused(self, program):
        self.check(program)


if __name__ == "__main__":
    run_tests()
