"""Tests properties that every verdict has, however the ranks ended."""

import re

from hypothesis import HealthCheck, given, settings, strategies as st
from kit.verdicts import ABORTS, ANY_CODE, CASE, ONE_OF_EACH, VerdictTestCase, skipped, victim

from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.launch import Expected, Outcome, RankEnding

ENDS = st.sampled_from([*ONE_OF_EACH, victim(), skipped("another reason", 72)])
WORLDS = st.lists(ENDS, min_size=1, max_size=6)
# The same examples each time, without a database of past ones. Each --repeat makes new instances of the test.
steady = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.differing_executors],
)
EXPECTATIONS = st.sampled_from([Expected(), ANY_CODE, ABORTS, Expected(code=3), Expected(True, 0)])


def read_numbers(text):
    """The numbers in a text such as `0-2, 5`."""
    spans = [part.partition("-") for part in text.split(", ")]
    return [rank for first, _, last in spans for rank in range(int(first), int(last or first) + 1)]


class TestProperties(VerdictTestCase):
    @steady
    @given(WORLDS, st.booleans(), EXPECTATIONS)
    def test_a_pass_needs_every_rank(self, reports, timed_out, expected):
        if self.judge(*reports, timed_out=timed_out, expected=expected).outcome is not Outcome.PASSED:
            return
        self.assertFalse(timed_out)
        allowed = {RankEnding.PASSED}
        if expected.any_code:
            allowed |= {RankEnding.EXITED, RankEnding.KILLED, RankEnding.SKIPPED}
        elif expected.code is not None:
            allowed |= {RankEnding.EXITED, RankEnding.KILLED}
            self.assertEqual(reports[0].code, expected.code)
        self.assertLessEqual({report.ending for report in reports}, allowed)

    @steady
    @given(WORLDS, st.booleans(), EXPECTATIONS)
    def test_a_skip_needs_every_rank(self, reports, timed_out, expected):
        if self.judge(*reports, timed_out=timed_out, expected=expected).outcome is Outcome.SKIPPED:
            self.assertFalse(timed_out)
            self.assertEqual({report.ending for report in reports}, {RankEnding.SKIPPED})

    @steady
    @given(WORLDS, st.booleans(), EXPECTATIONS)
    def test_every_failure_is_explained(self, reports, timed_out, expected):
        verdict = self.judge(*reports, timed_out=timed_out, expected=expected)
        if verdict.outcome in (Outcome.PASSED, Outcome.SKIPPED):
            return
        self.assertIn(CASE.rerun_command, verdict.message)
        found = re.findall(r"^  ranks ([\d, -]+) failed alike after [^:]*: (.*)$", verdict.message, re.MULTILINE)
        folded = {rank: why for ranks, why in found for rank in read_numbers(ranks)}
        for rank, report in enumerate(reports):
            if rank in folded:
                self.assertIn(report.ending, (RankEnding.FAILED, RankEnding.ERROR))
                self.assertTrue(report.line().endswith(f": {folded[rank]}"), folded[rank])
            else:
                self.assertIn(f"  rank {rank}: {report.line()}", verdict.message)

    @steady
    @given(WORLDS, st.randoms(use_true_random=False), st.booleans())
    def test_the_order_of_ranks_does_not_matter(self, reports, random, any_code):
        shuffled = random.sample(reports, len(reports))
        before, after = (self.judge(*order, expected=Expected(any_code)).outcome for order in (reports, shuffled))
        good = (Outcome.PASSED, Outcome.SKIPPED)
        self.assertEqual(before if before in good else "bad", after if after in good else "bad")

    @steady
    @given(WORLDS, st.booleans(), st.booleans())
    def test_the_culprit_did_not_pass(self, reports, timed_out, any_code):
        verdict = self.judge(*reports, timed_out=timed_out, expected=Expected(any_code))
        if verdict.culprit is not None:
            self.assertIsNot(reports[verdict.culprit].ending, RankEnding.PASSED)


if __name__ == "__main__":
    run_tests()
