"""Reports the results of a run as they come: each attempt, each test that has its final result, and warnings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..events import AttemptEnded, Event, TestFinished, Warned
from ..model import Attempt, FinishedTest, Summary, Test, Unit
from ..options.options import Options
from .attempts import Attempts


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
