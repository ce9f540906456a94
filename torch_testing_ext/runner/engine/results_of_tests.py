"""The attempts of all tests of a run, and what follows from each.

It knows no process, file or clock.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.runner.events import AttemptEnded, Event, TestFinished, Warned
from torch_testing_ext.runner.model import Attempt, FinishedTest, Summary, Test, TestId, Unit
from torch_testing_ext.runner.options import Options

# A test and its repetition.
Key = tuple[TestId, int]

# What torch and the system write: for processes that a test starts itself, of which only the output is known.
_IN_USE = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)


class Results:
    """Takes the attempts of a run: decides which tests run again, and has the run stopped when enough have failed."""

    def __init__(self, options: Options, report: Callable[[Event], object], stop: Callable[[str], object]):
        # Final results that count as failures.
        self.failures = 0
        # Tests without retries.
        self.new: frozenset[TestId] = frozenset()
        self._options = options
        self._policy = options.policy
        self._report = report
        self._stop = stop
        # Tests that run again while no other test runs.
        self._alone: set[Key] = set()
        self._attempts: dict[Key, list[Attempt]] = {}
        self._finished: dict[Key, FinishedTest] = {}
        # The tests that did not run to their end, with their repetition.
        self._unfinished: list[tuple[Test, int]] = []
        # Attempts that a node was lost with, and how.
        self._lost: dict[tuple[TestId, int, int], str] = {}
        self._warnings: list[str] = []
        # Texts of warnings of tests.
        self._shown: set[str] = set()

    def warn(self, text: str) -> None:
        self._warnings.append(text)
        self._report(Warned(text))

    def take(self, attempt: Attempt, may_retry: bool) -> bool:
        """Take an attempt that has ended into account. Returns whether the test is to be retried."""
        if attempt.outcome.is_failure and _says_in_use(attempt):
            attempt = replace(attempt, end=replace(attempt.end, port_in_use=True))
        self._attempts.setdefault(_key(attempt), []).append(attempt)
        failed = self._policy.verdict(attempt.outcome) is TestOutcome.FAILED
        retry = may_retry and failed and self._runs_again(attempt)
        self._report(AttemptEnded(attempt, retry))
        if not retry:
            self._finish(attempt)
        return retry

    def _runs_again(self, attempt: Attempt) -> bool:
        """Another test may have caused the failure: then this one runs again, once, whatever --retries says."""
        key = _key(attempt)
        why = why_to_run_alone(attempt)
        if why and key not in self._alone:
            self._alone.add(key)
            self.warn(f"{attempt.test.id}: {why}")
            return True
        return attempt.number <= self._options.retries and attempt.test.id not in self.new

    def _finish(self, attempt: Attempt) -> None:
        """Make the attempts of a test its final result, of which this is the last."""
        key = _key(attempt)
        finished = FinishedTest(tuple(self._attempts[key]))
        self._finished[key] = finished
        self._report(TestFinished(finished))
        if self._policy.verdict_on(finished) is TestOutcome.FAILED:
            self.failures += 1
        else:
            # The output of this test is not shown.
            self._show_warnings(finished.last)
        most = 1 if self._options.endless else self._options.maxfail
        if most is not None and self.failures >= most:
            tests = "test" if self.failures == 1 else "tests"
            self._stop(f"{self.failures} {tests} failed")

    def _show_warnings(self, attempt: Attempt) -> None:
        """Show each warning once: workers have the same ones."""
        for warning in attempt.end.warnings:
            if warning.text not in self._shown:
                self._shown.add(warning.text)
                self.warn(str(warning))

    def must_be_alone(self, tests: Iterable[Test], repetition: int) -> bool:
        return any((test.id, repetition) in self._alone for test in tests)

    def lose(self, unit: Unit, tests: Sequence[Test], why: str) -> tuple[tuple[Test, ...], list[tuple[Test, str]]]:
        """A node was lost with tests of a unit that had no result.

        Returns the tests that run again, as the same attempt, and those that have been lost before, with a message.
        """
        lost_once: list[Test] = []
        lost_twice: list[tuple[Test, str]] = []
        for test in tests:
            key = (test.id, unit.repetition, unit.attempt)
            before = self._lost.get(key)
            if before is None:
                self._lost[key] = why
                lost_once.append(test)
            else:
                message = f"it lost its node twice: first, {before}; then, {why}"
                lost_twice.append((test, message))
        if lost_once:
            runs = "runs" if len(lost_once) == 1 else f"and {len(lost_once) - 1} more run"
            self.warn(f"{why}: {lost_once[0].id} {runs} again, as the same attempt")
        return tuple(lost_once), lost_twice

    def leave(self, unit: Unit, tests: Sequence[Test]) -> None:
        """Note tests that do not run, or run no further, since the run ends."""
        self._unfinished += [(test, unit.repetition) for test in tests]

    def leave_all(self, units: Iterable[Unit]) -> None:
        """Note units of which no test has a result, since the run ends."""
        for unit in units:
            self.leave(unit, unit.tests)

    def summary(self, seconds: float, interrupted: bool, error: str) -> Summary:
        """End the run: a test that was to be retried has failed."""
        for key, attempts in self._attempts.items():
            if key not in self._finished:
                self._finish(attempts[-1])
        # Once, although several of its repetitions may be left.
        unfinished: dict[Test, None] = {}
        for test, repetition in self._unfinished:
            if (test.id, repetition) not in self._finished:
                unfinished[test] = None
        return Summary(
            tuple(self._finished.values()),
            seconds,
            self._policy,
            interrupted,
            tuple(unfinished),
            tuple(self._warnings),
            error,
        )


def _key(attempt: Attempt) -> Key:
    return attempt.test.id, attempt.repetition


def why_to_run_alone(attempt: Attempt) -> str:
    """The way in which another test may have caused this failure; empty if none can."""
    if attempt.end.port_in_use:
        return "a port was in use (EADDRINUSE); the test runs again alone"
    if attempt.evicted:
        return (
            f"it was terminated because node {attempt.lease.node} was short of memory, which other tests used too; "
            "it runs again alone"
        )
    return ""


def _says_in_use(attempt: Attempt) -> bool:
    if _IN_USE.search(attempt.output):
        return True
    return any(_IN_USE.search(log.output) for log in attempt.ranks)
