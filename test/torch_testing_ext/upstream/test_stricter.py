"""Tests when a failure is marked as stricter than PyTorch: a table, without processes."""

from __future__ import annotations

from kit.verdicts import report_on

from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests, subtest
from torch_testing_ext.launch import Case, Expected, RankEnding
from torch_testing_ext.launch.judging import judge
from torch_testing_ext.upstream.outcomes_of_pytorch import outcome_of_pytorch, remark_on_failure

PASSED = (RankEnding.PASSED, 0)
SKIPPED = (RankEnding.SKIPPED, 86)
FAILED = (RankEnding.FAILED, 10)
EXITED = (RankEnding.EXITED, 3)
EXITED_WITH_0 = (RankEnding.EXITED, 0)
CRASHED = (RankEnding.KILLED, -11)
STUCK = (RankEnding.STOPPED, -15)
PLAIN, ANY, ABORT = Expected(), Expected(any_code=True), Expected(code=-6)

CASES = {
    # name: ranks, what the test expects, PyTorch's outcome, whether we are stricter
    "all_pass": ([PASSED, PASSED], PLAIN, TestOutcome.PASSED, False),
    "all_skip": ([SKIPPED, SKIPPED], PLAIN, TestOutcome.SKIPPED, False),
    "one_fails": ([PASSED, FAILED], PLAIN, TestOutcome.ERROR, False),
    "rank_1_exits": ([PASSED, EXITED], PLAIN, TestOutcome.PASSED, True),
    "rank_0_exits": ([EXITED, PASSED], PLAIN, TestOutcome.FAILED, False),
    "rank_1_crashes": ([PASSED, CRASHED], PLAIN, TestOutcome.PASSED, True),
    "rank_0_exits_with_0": ([EXITED_WITH_0, PASSED], PLAIN, TestOutcome.PASSED, True),
    "rank_1_skips": ([PASSED, SKIPPED], PLAIN, TestOutcome.PASSED, True),
    "rank_0_skips_rank_1_crashes": ([SKIPPED, CRASHED], PLAIN, TestOutcome.SKIPPED, True),
    "rank_1_hangs": ([PASSED, STUCK], PLAIN, TestOutcome.TIMEOUT, False),
    "any_code": ([EXITED, CRASHED], ANY, TestOutcome.PASSED, False),
    "the_expected_code": ([(RankEnding.KILLED, -6), PASSED], ABORT, TestOutcome.PASSED, False),
    "another_code": ([EXITED, PASSED], ABORT, TestOutcome.FAILED, False),
}


@instantiate_parametrized_tests
class StricterTest(TestCase):
    @parametrize("case", [subtest(case, name=name) for name, case in CASES.items()])
    def test_remark(self, case: tuple[list[tuple[RankEnding, int]], Expected, TestOutcome, bool]) -> None:
        ends, expected, theirs, stricter = case
        reports = [report_on(rank, ending, code=code, summary="x") for rank, (ending, code) in enumerate(ends)]
        verdict = judge(reports, False, Case("T.test"), expected)
        self.assertEqual(outcome_of_pytorch(reports, expected), theirs)
        text = remark_on_failure(reports, expected, verdict)
        self.assertEqual(bool(text), stricter)
        if stricter:
            self.assertIn(f"would have {theirs.value}", text)


if __name__ == "__main__":
    run_tests()
