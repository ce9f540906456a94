"""Laws of growth: a test that claims one runs in a larger world, too, and fails if the law does not hold there."""

import pytest
from kit.files import subject
from kit.pytest_runs import PytestCase, run_pytest

from torch_testing_ext.common_utils import run_tests

SUBJECT = subject(__file__, "growth_of_steps.py")
SOUND = ("test_sound", "test_linear", "test_shards", "test_bad_input", "test_without_ranks", "Kept.test_sound")
# By the name of a test: what is said of it.
FAULTS = {
    "test_fault_bytes": "bytes of all_reduce in group 'world' grow with the world: 64 in 2 ranks, 128 in 4, at_most=0 "
    "allows 64\n    in 4: 128 by all_reduce at test_x.py:",
    "test_fault_memory": "bytes of memory grow with the world: ",
    "test_fault_of_the_leader": "calls of send in group 'world' grow with the world: 1 in 2 ranks, 3 in 4",
    "test_fault_nothing": "no rank has any calls of barrier, so that they cannot grow",
    "test_assertion_before": "AssertionError: assert 4 ",
    "test_spawn": "the growth cannot be told in a world of 4 ranks: a function that a test spawns",
    "Fresh.test_fault": "calls in group 'world' grow with the world: 2 in 2 ranks, 4 in 4",
    "Kept.test_fault": "calls in group 'world' grow with the world: 2 in 2 ranks, 4 in 4",
}


@pytest.mark.slow
class GrowthTest(PytestCase):
    def test_laws_hold_or_are_told(self):
        run = run_pytest({"test_x.py": SUBJECT})
        expected = dict.fromkeys(SOUND, "passed") | dict.fromkeys(FAULTS, "failed")
        self.assertOutcomes(run, expected)
        for name, said in FAULTS.items():
            self.assertIn(said, run.messages[name], name)
        self.assertIn("Call grows() before assertions", run.messages["test_assertion_before"])
        self.assertNotIn("torch_testing_ext", run.messages["test_fault_bytes"])

    def test_in_a_simulated_world(self):
        """The size of the run is that from which the world doubles."""
        run = run_pytest({"test_x.py": SUBJECT}, "--simulate", "4", "-k", "test_fault_bytes or test_shards")
        self.assertOutcomes(run, {"test_fault_bytes": "failed", "test_shards": "passed"})
        self.assertIn("128 in 4 ranks, 256 in 8", run.messages["test_fault_bytes"])


if __name__ == "__main__":
    run_tests()
