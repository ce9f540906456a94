"""Outcomes that PyTorch's base would have given tests, by rank 0 alone."""

from collections.abc import Sequence

from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.launch import ERROR_EXIT_CODE, Expected, RankEnding, RankReport, Verdict

SKIP_CODES = frozenset(range(72, 90))


def remark_on_failure(reports: Sequence[RankReport], expected: Expected, verdict: Verdict) -> str:
    """The text to add to a failure that PyTorch's base, which judges by exit codes, would not have reported; or ""."""
    clean = (TestOutcome.PASSED, TestOutcome.SKIPPED)
    if verdict.outcome in clean:
        return ""
    theirs = outcome_of_pytorch(reports, expected)
    if theirs not in clean:
        return ""
    return f"This is stricter than PyTorch, where the test would have {theirs.value}: its base judges by rank 0 alone."


def outcome_of_pytorch(reports: Sequence[RankReport], expected: Expected) -> TestOutcome:
    """The outcome that PyTorch's MultiProcessTestCase gives a test whose ranks end like this."""
    for report in reports:
        # PyTorch waits for such a rank.
        if report.ending in (RankEnding.STOPPED, RankEnding.LOST):
            return TestOutcome.TIMEOUT
    if any(report.code == ERROR_EXIT_CODE for report in reports):
        return TestOutcome.ERROR
    if expected.any_code:
        return TestOutcome.PASSED
    code = reports[0].code
    if code in SKIP_CODES:
        return TestOutcome.SKIPPED
    if code == (expected.code or 0):
        return TestOutcome.PASSED
    return TestOutcome.FAILED
