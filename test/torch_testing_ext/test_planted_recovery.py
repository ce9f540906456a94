"""Planted bugs of recovery are told, with the cause in the first two lines; the programs without them pass."""

import unittest

from kit.leftovers import nothing_left
from kit.outcomes import outcome_of
from planted_recovery import BUGS, FIXED

from torch_testing_ext.common_utils import run_tests


class PlantedRecoveryTest(unittest.TestCase):
    """The methods are made below: one for each bug."""

    @classmethod
    def setUpClass(cls):
        # The server is there from now on, and counted before and after.
        outcome_of(FIXED[-1]())

    def check(self, planted):
        with nothing_left(self):
            seen = outcome_of(planted.case())
        self.assertIn(seen.outcome, ("failed", "error"), planted.bug)
        beginning = seen.message.partition("common_distributed.Rank")[2]
        first_two_lines = "\n".join(beginning.splitlines()[:2])
        for text in planted.told:
            self.assertIn(text, first_two_lines, seen.message)

    def test_fixed_programs_pass(self):
        for make in FIXED:
            with self.subTest(test=make().id()), nothing_left(self):
                self.assertEqual(outcome_of(make()), ("passed", ""))


for _planted in BUGS:
    _name = f"test_{_planted.test}_{_planted.bug}"
    setattr(PlantedRecoveryTest, _name, lambda self, planted=_planted: self.check(planted))


if __name__ == "__main__":
    run_tests()
