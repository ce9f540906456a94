"""The attempts of all tests of a run, what follows from each (a retry or a final result), and what is reported of them.

It knows no process, file or clock.
"""

import re
from collections.abc import Callable, Iterable, Sequence

from torch_testing_ext._process.words import count

from ..events import AttemptEnded, Event, TestFinished, Warned
from ..model import Attempt, Category, FinishedTest, Summary, Test, TestId, Unit
from ..options.options import Options

Key = tuple[TestId, int]  # a test and its repetition

# As torch and the system write it: for processes that a test starts itself, of which only the output is known.
_IN_USE = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)


class Results:
    """Takes the attempts of a run: decides which tests run again, and has the run stopped when enough have failed."""

    def __init__(self, options: Options, report: Callable[[Event], object], stop: Callable[[str], object]):
        self.failures = 0  # final results that count as failures
        self._options = options
        self._policy = options.policy
        self._report = report
        self._stop = stop
        self._alone: set[Key] = set()  # tests that run again while no other test runs
        self._attempts: dict[Key, list[Attempt]] = {}
        self._finished: dict[Key, FinishedTest] = {}
        self._unfinished: list[tuple[Test, int]] = []  # with their repetition
        self._lost: dict[tuple[TestId, int, int], str] = {}  # attempts that a node was lost with, and how
        self._warnings: list[str] = []
        self._shown: set[str] = set()  # texts of warnings of tests

    def warn(self, text: str) -> None:
        self._warnings.append(text)
        self._report(Warned(text))

    def take(self, attempt: Attempt, may_retry: bool) -> bool:
        """Take an attempt that has ended into account. Returns whether the test is to be retried."""
        self._attempts.setdefault(_key(attempt), []).append(attempt)
        failed = self._policy.verdict(attempt.outcome) is Category.FAILED
        retry = may_retry and failed and self._runs_again(attempt)
        self._report(AttemptEnded(attempt, retry))
        if not retry:
            self._finish(attempt)
        return retry

    def _runs_again(self, attempt: Attempt) -> bool:
        """Another test may have caused the failure: then this one runs again, once, whatever --retries says."""
        if _key(attempt) not in self._alone and (why := why_to_run_alone(attempt)):
            self._alone.add(_key(attempt))
            self.warn(f"{attempt.test.id}: {why}")
            return True
        return attempt.number <= self._options.retries

    def _finish(self, attempt: Attempt) -> None:
        finished = FinishedTest(tuple(self._attempts[_key(attempt)]))
        self._finished[_key(attempt)] = finished
        failed = self._policy.verdict_on(finished) is Category.FAILED
        self.failures += failed
        self._report(TestFinished(finished))
        # Of a test whose output is not shown. Workers have the same ones: show each once.
        for warning in () if failed else finished.last.warnings:
            if warning.text not in self._shown:
                self._shown.add(warning.text)
                self.warn(str(warning))
        most = 1 if self._options.until_failure else self._options.max_fail
        if most is not None and self.failures >= most:
            self._stop(f"{count(self.failures, 'test')} failed")

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
        if again:
            run = f"and {len(again) - 1} more run" if again[1:] else "runs"
            self.warn(f"{why}: {again[0].id} {run} again, as the same attempt")
        return again, twice

    def leave(self, unit: Unit, tests: Sequence[Test]) -> None:
        """Note tests that do not run, or run no further, since the run ends."""
        self._unfinished += [(test, unit.repetition) for test in tests]

    def summary(self, seconds: float, interrupted: bool, error: str) -> Summary:
        """End the run: a test that was to be retried has failed."""
        for key, attempts in self._attempts.items():
            if key not in self._finished:
                self._finish(attempts[-1])
        left = (test for test, repetition in self._unfinished if (test.id, repetition) not in self._finished)
        finished, unfinished = tuple(self._finished.values()), tuple(dict.fromkeys(left))
        return Summary(finished, seconds, self._policy, interrupted, unfinished, tuple(self._warnings), error)


def _key(attempt: Attempt) -> Key:
    return attempt.test.id, attempt.repetition


def why_to_run_alone(attempt: Attempt) -> str:
    """Says how another test may have caused this failure; empty if none can."""
    printed = (attempt.output, *(log.output for log in attempt.ranks))
    if attempt.port_in_use or any(_IN_USE.search(text) for text in printed):
        return "a port was in use (EADDRINUSE); the test runs again while no other runs"
    if attempt.evicted:
        return (
            f"it was ended because node {attempt.lease.node} was short of memory, which other tests used, too; "
            "it runs again while no other runs"
        )
    return ""
