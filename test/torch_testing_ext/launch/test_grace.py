"""Tests how long ranks that still run get after others have ended, as a table."""

import unittest

from torch_testing_ext._process import grace
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.launch import Expected, RankEnding, RankReport
from torch_testing_ext.launch.watch import Grace


class TestGrace(unittest.TestCase):
    def after(self, *ends, expected=None):
        seen = Grace(expected or Expected())
        for ending, at in ends:
            seen.on_end(RankReport(0, ending), at)
        return seen

    def test_after_each_ending(self):
        table = {
            RankEnding.PASSED: None,
            RankEnding.SKIPPED: 10.0 + grace.AFTER_SKIP,
            RankEnding.FAILED: 10.0 + grace.AFTER_FAILURE,
            RankEnding.ERROR: 10.0 + grace.AFTER_FAILURE,
            RankEnding.KILLED: 10.0 + grace.AFTER_DEATH,
            RankEnding.EXITED: 10.0 + grace.AFTER_DEATH,
        }
        for ending, ends in table.items():
            with self.subTest(ending):
                seen = self.after((ending, 10.0))
                self.assertEqual(seen.ends, ends)
                self.assertEqual(seen.has_failed, ending.is_failure)

    def test_codes_that_the_test_expects(self):
        seen = self.after((RankEnding.EXITED, 10.0), (RankEnding.SKIPPED, 11.0), expected=Expected(any_code=True))
        self.assertEqual((seen.ends, seen.has_failed), (None, False))

    def test_the_first_end_counts(self):
        """A skip gives time, and a death takes it."""
        skip, death = (RankEnding.SKIPPED, 10.0), (RankEnding.KILLED, 12.0)
        self.assertEqual(self.after(skip, death).ends, 12.0 + grace.AFTER_DEATH)
        self.assertEqual(self.after(death, (RankEnding.FAILED, 12.3)).ends, 12.0 + grace.AFTER_DEATH)

    def test_stacks_of_ranks_that_wait_for_a_dead_one_take_less_time(self):
        self.assertEqual(self.after((RankEnding.FAILED, 1.0)).stacks_timeout, grace.FOR_STACKS)
        self.assertEqual(self.after((RankEnding.KILLED, 1.0)).stacks_timeout, grace.FOR_STACKS_AFTER_DEATH)


if __name__ == "__main__":
    run_tests()
