"""Random training programs: the compiled step does what the eager step does under DDP, or is refused.

A run takes the programs of spmd_examples.py. To search for others, for hours:

    export DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=9000
    python test/distributed/properties/test_spmd_properties.py --hypothesis-profile=search
"""

import spmd_examples as examples
from hypothesis import HealthCheck, Verbosity
from spmd_programs import recipes
from spmd_truth import INVALID, REFUSED, RIGHT, check

from torch_testing_ext.common_distributed import MultiProcessTestCase, requires_gloo
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.hypothesis_utils import assume, given, note, replay, settings

PROFILE = settings(
    max_examples=8,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    verbosity=Verbosity.normal,
)


class ProgramsTestCase(MultiProcessTestCase):
    """Runs programs in all ranks. A program of the mainstream must not be refused."""

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def check(self, recipe):
        note(recipe.source())
        outcome = check(recipe)
        assume(outcome.kind != INVALID)
        allowed = (RIGHT, REFUSED) if recipe.odd else (RIGHT,)
        self.assertIn(outcome.kind, allowed, f"{outcome}")


@requires_gloo()
class TestProgramsOnTwoRanks(ProgramsTestCase):
    world_size = 2

    @PROFILE
    @replay(examples.ON_TWO_RANKS)
    @given(recipe=recipes())
    def test_right_or_refused(self, recipe):
        self.check(recipe)

    @PROFILE
    @replay(examples.OF_THE_MAINSTREAM)
    @given(recipe=recipes(max_odd=0))
    def test_mainstream_is_right(self, recipe):
        self.check(recipe)


@requires_gloo()
class TestProgramsOnFourRanks(ProgramsTestCase):
    world_size = 4

    @PROFILE
    @replay(examples.ON_FOUR_RANKS)
    @given(recipe=recipes())
    def test_right_or_refused(self, recipe):
        self.check(recipe)


if __name__ == "__main__":
    run_tests()
