"""Would PyTorch's base have let this pass? It looks at exit codes, and mostly at that of rank 0. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from torch_testing_ext.launch import Expected, Outcome, RankEnding, RankReport, Verdict

# How a rank ends whose test raised; PyTorch's base fails for such a rank, whichever it is.
ERROR_CODE = 10
SKIP_CODES = frozenset(range(72, 90))


def remark(reports: Sequence[RankReport], expected: Expected, verdict: Verdict) -> str:
    """What to add to a failure that PyTorch's base would not have reported; else nothing."""
    if verdict.outcome in (Outcome.PASSED, Outcome.SKIPPED):
        return ""
    theirs = outcome_of_pytorch(reports, expected)
    if theirs not in (Outcome.PASSED, Outcome.SKIPPED):
        return ""
    return f"This is stricter than PyTorch, where the test would have {theirs.value}: its base judges by rank 0 alone."


def outcome_of_pytorch(reports: Sequence[RankReport], expected: Expected) -> Outcome:
    """What MultiProcessTestCase of torch.testing._internal makes of ranks that end like these."""
    if any(report.ending in (RankEnding.STOPPED, RankEnding.LOST) for report in reports):
        return Outcome.TIMEOUT  # it waits for them
    if any(report.code == ERROR_CODE for report in reports):
        return Outcome.ERROR
    if expected.any_code:
        return Outcome.PASSED
    if reports[0].code in SKIP_CODES:
        return Outcome.SKIPPED
    return Outcome.PASSED if reports[0].code == (expected.code or 0) else Outcome.FAILED
