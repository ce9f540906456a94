"""Tests that a verdict takes all of the evidence into account: no process."""

import unittest
from dataclasses import replace

from kit.verdicts import report_on

from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.launch import Case, Expected, RankEnding, RankReport
from torch_testing_ext.launch.nccl_status import NcclRank
from torch_testing_ext.launch.watching.evidence import RankEvidence

PASSED = (RankReport(0, RankEnding.PASSED), RankReport(1, RankEnding.PASSED))
FAILED = (RankReport(0, RankEnding.PASSED), report_on(1, RankEnding.FAILED, summary="AssertionError: no", code=10))
STOPPED = (RankReport(0, RankEnding.PASSED), RankReport(1, RankEnding.STOPPED))
CASE = Case("T.test_x", note="note of the case")


class TestVerdict(unittest.TestCase):
    def test_a_pass(self):
        self.assertIs(RankEvidence(PASSED).verdict(CASE).outcome, TestOutcome.PASSED)

    def test_all_passed_at_the_time_out(self):
        self.assertIs(RankEvidence(PASSED, timed_out=True).verdict(CASE).outcome, TestOutcome.TIMEOUT)

    def test_a_time_out(self):
        self.assertIs(RankEvidence(STOPPED, timed_out=True).verdict(CASE).outcome, TestOutcome.TIMEOUT)

    def test_an_exit_code_that_is_expected(self):
        verdict = RankEvidence(PASSED, expected=Expected(code=3)).verdict(CASE)
        self.assertIs(verdict.outcome, TestOutcome.FAILED)

    def test_a_failure_has_the_notes_of_the_case_and_of_the_evidence(self):
        verdict = RankEvidence(FAILED, note="note of the run").verdict(CASE)
        self.assertEqual((verdict.outcome, verdict.culprit), (TestOutcome.FAILED, 1))
        self.assertIn("note of the case\n\nnote of the run", verdict.message)

    def test_a_rank_that_answers_nothing_is_blamed(self):
        """As one that is stuck in C and keeps the GIL."""
        stacks = 'Thread 1:\n  File "t.py", line 3 in test_x'
        shown = [RankReport(rank, RankEnding.STOPPED, stacks="" if rank == 1 else stacks) for rank in range(3)]
        verdict = RankEvidence(tuple(shown), timed_out=True).verdict(CASE)
        self.assertEqual(verdict.culprit, 1)
        self.assertIn("timed out after 0.0 s; rank 1 of 3 gave no answer", verdict.failure.title)
        both = tuple(replace(report, was_stopped=report.rank == 0) for report in shown)
        title = RankEvidence(both, timed_out=True).verdict(CASE).failure.title
        self.assertIn("rank 0 of 3 was stopped, as by SIGSTOP; rank 1 of 3 gave no answer", title)
        none = tuple(RankReport(rank, RankEnding.STOPPED) for rank in range(3))
        self.assertIn("all 3 ranks still running", RankEvidence(none, timed_out=True).verdict(CASE).failure.title)

    def test_a_rank_that_nccl_has_lost_is_blamed(self):
        reports = tuple(
            RankReport(rank, RankEnding.STOPPED, nccl=NcclRank(is_missing=rank == 1, calls={"0xa": 3}))
            for rank in range(3)
        )
        verdict = RankEvidence(reports, timed_out=True).verdict(CASE)
        self.assertEqual(verdict.culprit, 1)
        self.assertIn("timed out after 0.0 s; NCCL gets no answer from rank 1 of 3", verdict.failure.title)
        row = next(row for row in verdict.failure.rows if 1 in row.ranks)
        self.assertEqual(row.did, "still running; NCCL gets no answer from it")
        self.assertIn("  rank 1: NCCL gets no answer from it, 3 collectives in 0xa", verdict.account)


if __name__ == "__main__":
    run_tests()
