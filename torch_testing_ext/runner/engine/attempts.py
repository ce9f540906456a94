"""The attempts of all tests of a run, what follows from each (a retry or a final result), and what is reported of them.

It knows no process, file or clock.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from ..events import AttemptEnded, Event, TestFinished, Warned
from ..model import Attempt, Category, FinishedTest, Policy, Summary, Test, TestId, Unit
from ..options.options import Options

Key = tuple[TestId, int]  # a test and its repetition

# As torch and the system write it: for processes that a test starts itself, of which only the output is known.
_IN_USE = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)


class Attempts:
    """Decides which tests run again, and which have their final result."""

    def __init__(self, policy: Policy, retries: int):
        self.failures = 0  # final results that count as failures
        self._policy = policy
        self._retries = retries
        self._alone: set[Key] = set()  # tests that run again while no other test runs
        self._attempts: dict[Key, list[Attempt]] = {}
        self._finished: dict[Key, FinishedTest] = {}
        self._unfinished: list[tuple[Test, int]] = []  # with their repetition
        self._lost: dict[tuple[TestId, int, int], str] = {}  # attempts that a node was lost with, and how

    def add(self, attempt: Attempt, may_retry: bool) -> tuple[bool, str]:
        """Take an attempt that has ended. Returns whether the test is to be retried, and a warning."""
        self._attempts.setdefault(_key(attempt), []).append(attempt)
        if not may_retry or self._policy.verdict(attempt.outcome) is not Category.FAILED:
            return False, ""
        # Another test may have caused the failure: this one runs again, once, whatever --retries says.
        if _key(attempt) not in self._alone and (why := why_to_run_alone(attempt)):
            self._alone.add(_key(attempt))
            return True, f"{attempt.test.id}: {why}"
        return attempt.number <= self._retries, ""

    def finish(self, attempt: Attempt) -> FinishedTest:
        """Make this attempt the last of its test."""
        finished = FinishedTest(tuple(self._attempts[_key(attempt)]))
        self._finished[_key(attempt)] = finished
        self.failures += self.has_failed(finished)
        return finished

    def has_failed(self, finished: FinishedTest) -> bool:
        return self._policy.verdict_on(finished) is Category.FAILED

    def must_be_alone(self, tests: Iterable[Test], repetition: int) -> bool:
        return any((test.id, repetition) in self._alone for test in tests)

    def lose(self, unit: Unit, tests: Sequence[Test], why: str) -> tuple[tuple[Test, ...], list[tuple[Test, str]]]:
        """A node was lost with tests of a unit that had no result.

        Returns the tests that run again, as the same attempt, and those that have been lost before, with a message.
        """
        before = {test.id: self._lost.get((test.id, unit.repetition, unit.attempt)) for test in tests}
        again = tuple(test for test in tests if before[test.id] is None)
        self._lost.update(((test.id, unit.repetition, unit.attempt), why) for test in again)
        twice = [
            (test, f"it was lost twice with the node that it ran on: first, {before[test.id]}; then, {why}")
            for test in tests
            if before[test.id] is not None
        ]
        return again, twice

    def leave(self, unit: Unit, tests: Sequence[Test]) -> None:
        """Note tests that do not run, or run no further, since the run ends."""
        self._unfinished += [(test, unit.repetition) for test in tests]

    def cut_short(self) -> Iterator[Attempt]:
        """The last attempt of each test that was to be retried when the run ended: it has failed."""
        return (attempts[-1] for key, attempts in self._attempts.items() if key not in self._finished)

    @property
    def last_repetition(self) -> int:
        return max(repetition for _, repetition in self._attempts)

    @property
    def finished(self) -> tuple[FinishedTest, ...]:
        return tuple(self._finished.values())

    @property
    def unfinished(self) -> tuple[Test, ...]:
        """The tests that were left without a result, each once."""
        left = (test for test, repetition in self._unfinished if (test.id, repetition) not in self._finished)
        return tuple(dict.fromkeys(left))


def _key(attempt: Attempt) -> Key:
    return attempt.test.id, attempt.repetition


def why_to_run_alone(attempt: Attempt) -> str:
    """Says how another test may have caused this failure; empty if none can."""
    if is_collision(attempt):
        return "a port was in use (EADDRINUSE); the test runs again while no other runs"
    if attempt.evicted:
        return (
            f"it was ended because node {attempt.lease.node} was short of memory, which other tests used, too; "
            "it runs again while no other runs"
        )
    return ""


def is_collision(attempt: Attempt) -> bool:
    """Did this attempt fail because a port was in use?"""
    printed = (attempt.output, *(log.output for log in attempt.ranks))
    return attempt.port_in_use or any(_IN_USE.search(text) for text in printed)


# -- the reports


class Results:
    """Takes the attempts of a run, and has the run stopped when enough tests have failed."""

    def __init__(self, options: Options, report: Callable[[Event], object], stop: Callable[[str], object]):
        self.attempts = Attempts(options.policy, options.retries)
        self._options = options
        self._report = report
        self._stop = stop
        self._warnings: list[str] = []
        self._shown: set[str] = set()  # texts of warnings of tests

    def warn(self, text: str) -> None:
        self._warnings.append(text)
        self._report(Warned(text))

    def take(self, attempt: Attempt, may_retry: bool) -> bool:
        """Take an attempt into account. Returns whether the test is to be retried."""
        retry, warning = self.attempts.add(attempt, may_retry)
        if warning:
            self.warn(warning)
        self._report(AttemptEnded(attempt, retry))
        if not retry:
            self._finish(attempt)
        return retry

    def _finish(self, attempt: Attempt) -> None:
        finished = self.attempts.finish(attempt)
        self._report(TestFinished(finished))
        self._show_warnings(finished)
        most, failures = 1 if self._options.until_failure else self._options.max_fail, self.attempts.failures
        if most is not None and failures >= most:
            self._stop(f"{failures} test{'s' if failures > 1 else ''} failed")

    def _show_warnings(self, finished: FinishedTest) -> None:
        """Show the warnings of a test whose output is not shown. Workers have the same ones: show each once."""
        for warning in () if self.attempts.has_failed(finished) else finished.last.warnings:
            if warning.text not in self._shown:
                self._shown.add(warning.text)
                self.warn(str(warning))

    def lose(self, unit: Unit, tests: Sequence[Test], why: str) -> tuple[tuple[Test, ...], list[tuple[Test, str]]]:
        """A node was lost with tests of a unit. Returns those that run again, and the others, with a message."""
        again, lost_twice = self.attempts.lose(unit, tests, why)
        if again:
            self.warn(f"{why}: {_names_of(again)} again, as the same attempt")
        return again, lost_twice

    def summary(self, seconds: float, interrupted: bool, error: str) -> Summary:
        """End the run: a test that was to be retried has failed."""
        for attempt in tuple(self.attempts.cut_short()):
            self._finish(attempt)
        attempts, warnings = self.attempts, tuple(self._warnings)
        return Summary(
            attempts.finished, seconds, self._options.policy, interrupted, attempts.unfinished, warnings, error
        )


def _names_of(tests: Sequence[Test]) -> str:
    """`test_x.py::T::test_a runs`, or for several tests `test_x.py::T::test_a and 3 more run`."""
    more = len(tests) - 1
    return f"{tests[0].id} and {more} more run" if more else f"{tests[0].id} runs"
