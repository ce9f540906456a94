"""Runs one unittest test case, and tells its outcome."""

import unittest
from typing import NamedTuple


class Seen(NamedTuple):
    outcome: str  # passed, skipped, failed, error, expected failure, unexpected success
    message: str


def outcome_of(test: unittest.TestCase) -> Seen:
    """Run one test case, and return its outcome in unittest."""
    result = unittest.TestResult()
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
