"""Tell whether PyTorch's base would have let a test pass: it judges by exit codes, mostly that of rank 0. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from torch_testing_ext.launch import ERROR_EXIT_CODE, Expected, Outcome, RankEnding, RankReport, Verdict

SKIP_CODES = frozenset(range(72, 90))


def remark(reports: Sequence[RankReport], expected: Expected, verdict: Verdict) -> str:
    """The text to add to a failure that PyTorch's base would not have reported; otherwise empty."""
    if verdict.outcome in (Outcome.PASSED, Outcome.SKIPPED):
        return ""
    theirs = outcome_of_pytorch(reports, expected)
    if theirs not in (Outcome.PASSED, Outcome.SKIPPED):
        return ""
    return f"This is stricter than PyTorch, where the test would have {theirs.value}: its base judges by rank 0 alone."


def outcome_of_pytorch(reports: Sequence[RankReport], expected: Expected) -> Outcome:
    """The outcome that PyTorch's MultiProcessTestCase gives a test whose ranks end like this."""
    if any(report.ending in (RankEnding.STOPPED, RankEnding.LOST) for report in reports):
        return Outcome.TIMEOUT  # PyTorch waits for such a rank
    if any(report.code == ERROR_EXIT_CODE for report in reports):
        return Outcome.ERROR
    if expected.any_code:
        return Outcome.PASSED
    if reports[0].code in SKIP_CODES:
        return Outcome.SKIPPED
    return Outcome.PASSED if reports[0].code == (expected.code or 0) else Outcome.FAILED
