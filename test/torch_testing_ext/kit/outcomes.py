"""Runs one unittest test case, and tells its outcome."""

import unittest
from typing import NamedTuple

from torch_testing_ext._collectives.failure import joined


class Seen(NamedTuple):
    outcome: str  # passed, skipped, failed, error, expected failure, unexpected success
    message: str


class AccountsResult(unittest.TestResult):
    """A result whose texts have, behind each failure of ranks, its account."""

    def _exc_info_to_string(self, err, test):
        return joined(super()._exc_info_to_string(err, test), getattr(err[1], "account", ""))


def outcome_of(test: unittest.TestCase) -> Seen:
    """Run one test case, and return its outcome in unittest."""
    result = AccountsResult()
    test.run(result)
    for outcome, entries in (
        ("error", result.errors),
        ("failed", result.failures),
        ("skipped", result.skipped),
        ("expected failure", result.expectedFailures),
    ):
        if entries:
            return Seen(outcome, "\n".join(text for _, text in entries))
    return Seen("unexpected success" if result.unexpectedSuccesses else "passed", "")
