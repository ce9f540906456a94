"""The ways in which a test ends, for ranks, pytest and the runner alike."""

from __future__ import annotations

import enum


class TestOutcome(enum.Enum):
    """The outcome of a test. A verdict on ranks is never leaked, flaky, or one of unittest's expected ones."""

    __test__ = False  # not a test for pytest to collect

    PASSED = "passed"
    FAILED = "failed"  # an assertion, or ranks that disagree
    ERROR = "error"  # an exception; a file that cannot be imported
    TIMEOUT = "timeout"
    CRASHED = "crashed"  # a signal, or an exit before the test was over
    LEAKED = "leaked"  # passed, but left processes running, which were terminated, or memory of a device in use
    FLAKY = "flaky"  # failed, then passed on a retry
    SKIPPED = "skipped"
    EXPECTED_FAILURE = "expected failure"
    UNEXPECTED_SUCCESS = "unexpected success"

    @property
    def counts_as(self) -> TestOutcome:
        """The outcome that the last line of a report counts, unless the run is stricter: one of VERDICTS."""
        if self in _PASSES:
            return TestOutcome.PASSED
        return self if self is TestOutcome.SKIPPED else TestOutcome.FAILED

    @property
    def is_failure(self) -> bool:
        return self.counts_as is TestOutcome.FAILED


_PASSES = (TestOutcome.PASSED, TestOutcome.LEAKED, TestOutcome.FLAKY, TestOutcome.EXPECTED_FAILURE)
# The outcomes that the last line of a report counts, in its order.
VERDICTS = (TestOutcome.PASSED, TestOutcome.FAILED, TestOutcome.SKIPPED)
