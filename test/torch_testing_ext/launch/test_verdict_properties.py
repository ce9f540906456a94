"""Tests properties that every verdict has, however the ranks ended."""

import functools
import re

from kit.drawing import Drawer, seeds
from kit.verdicts import ABORTS, ANY_CODE, CASE, ONE_OF_EACH, VerdictTestCase, skipped, victim

from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.launch import Expected, RankEnding

ENDS = [*ONE_OF_EACH, victim(), skipped("another reason", 72)]
EXPECTATIONS = [Expected(), ANY_CODE, ABORTS, Expected(code=3), Expected(True, 0)]


def in_many_worlds(check):
    """Have a test get the reports of some ranks, whether it timed out, what it expected, and a source of randomness."""

    @functools.wraps(check)
    def test(self):
        for seed in seeds(600):
            draw = Drawer(seed)
            # Ranks that all pass, or all skip, would be rare if each ended in any way.
            kinds = draw.several(lambda draw: draw.one_of(ENDS), 1, 2) if draw.one_of([True, False]) else ENDS
            reports = draw.several(lambda draw, kinds=kinds: draw.one_of(kinds), 1, 6)
            with self.subTest(seed=seed):
                check(self, reports, draw.one_of([False, True]), draw.one_of(EXPECTATIONS), draw)

    del test.__wrapped__  # pytest would take the arguments for fixtures
    return test


def read_numbers(text):
    """The numbers in a text such as `0-2, 5`."""
    spans = [part.partition("-") for part in text.split(", ")]
    return [rank for first, _, last in spans for rank in range(int(first), int(last or first) + 1)]


class TestProperties(VerdictTestCase):
    @in_many_worlds
    def test_a_pass_needs_every_rank(self, reports, timed_out, expected, _):
        if self.judge(*reports, timed_out=timed_out, expected=expected).outcome is not TestOutcome.PASSED:
            return
        self.assertFalse(timed_out)
        allowed = {RankEnding.PASSED}
        if expected.any_code:
            allowed |= {RankEnding.EXITED, RankEnding.KILLED, RankEnding.SKIPPED}
        elif expected.code is not None:
            allowed |= {RankEnding.EXITED, RankEnding.KILLED}
            self.assertEqual(reports[0].code, expected.code)
        self.assertLessEqual({report.ending for report in reports}, allowed)

    @in_many_worlds
    def test_a_skip_needs_every_rank(self, reports, timed_out, expected, _):
        if self.judge(*reports, timed_out=timed_out, expected=expected).outcome is TestOutcome.SKIPPED:
            self.assertFalse(timed_out)
            self.assertEqual({report.ending for report in reports}, {RankEnding.SKIPPED})

    @in_many_worlds
    def test_every_failure_is_explained(self, reports, timed_out, expected, _):
        verdict = self.judge(*reports, timed_out=timed_out, expected=expected)
        if verdict.outcome in (TestOutcome.PASSED, TestOutcome.SKIPPED):
            return
        self.assertIn(CASE.rerun_command, verdict.message)
        found = re.findall(
            r"^  ranks ([\d, -]+) failed in the same way after [^:]*: (.*)$", verdict.message, re.MULTILINE
        )
        folded = {rank: why for ranks, why in found for rank in read_numbers(ranks)}
        for rank, report in enumerate(reports):
            if rank in folded:
                self.assertIn(report.ending, (RankEnding.FAILED, RankEnding.ERROR))
                self.assertTrue(report.line().endswith(f": {folded[rank]}"), folded[rank])
            else:
                self.assertIn(f"  rank {rank}: {report.line()}", verdict.message)

    @in_many_worlds
    def test_the_order_of_ranks_does_not_matter(self, reports, any_code, _, draw):
        orders = reports, draw.shuffled(reports)
        before, after = (self.judge(*order, expected=Expected(any_code)).outcome for order in orders)
        good = (TestOutcome.PASSED, TestOutcome.SKIPPED)
        self.assertEqual(before if before in good else "bad", after if after in good else "bad")

    @in_many_worlds
    def test_the_culprit_did_not_pass(self, reports, timed_out, _, draw):
        verdict = self.judge(*reports, timed_out=timed_out, expected=Expected(draw.one_of([False, True])))
        if verdict.culprit is not None:
            self.assertIsNot(reports[verdict.culprit].ending, RankEnding.PASSED)


if __name__ == "__main__":
    run_tests()
