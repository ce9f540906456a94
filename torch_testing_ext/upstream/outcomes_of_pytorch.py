"""Outcomes that PyTorch's base would have given tests, by rank 0 alone."""

from collections.abc import Sequence

from torch_testing_ext.launch import ERROR_EXIT_CODE, Expected, Outcome, RankEnding, RankReport, Verdict

SKIP_CODES = frozenset(range(72, 90))


def remark_on_failure(reports: Sequence[RankReport], expected: Expected, verdict: Verdict) -> str:
    """The text to add to a failure that PyTorch's base, which judges by exit codes, would not have reported; or ""."""
    clean = (Outcome.PASSED, Outcome.SKIPPED)
    if verdict.outcome in clean:
        return ""
    theirs = outcome_of_pytorch(reports, expected)
    if theirs not in clean:
        return ""
    return f"This is stricter than PyTorch, where the test would have {theirs.value}: its base judges by rank 0 alone."


def outcome_of_pytorch(reports: Sequence[RankReport], expected: Expected) -> Outcome:
    """The outcome that PyTorch's MultiProcessTestCase gives a test whose ranks end like this."""
    for report in reports:
        # PyTorch waits for such a rank.
        if report.ending in (RankEnding.STOPPED, RankEnding.LOST):
            return Outcome.TIMEOUT
    if any(report.code == ERROR_EXIT_CODE for report in reports):
        return Outcome.ERROR
    if expected.any_code:
        return Outcome.PASSED
    code = reports[0].code
    if code in SKIP_CODES:
        return Outcome.SKIPPED
    if code == (expected.code or 0):
        return Outcome.PASSED
    return Outcome.FAILED
