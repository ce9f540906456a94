"""The durations and the failures of tests in earlier runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..model import FinishedTest, Summary, TestId, TestOutcome
from .remembered import Remembered, Warn

# Outcomes whose duration is representative.
REPRESENTATIVE = (TestOutcome.PASSED, TestOutcome.EXPECTED_FAILURE)


class Durations:
    """The recorded durations of tests. What a run records takes effect in the next run."""

    def __init__(self, folder: Path, warn: Warn):
        self._remembered = Remembered(folder, "durations", _is_seconds, warn)
        self._seconds: Mapping[str, float] = self._remembered.load()

    def expected(self, test: TestId) -> float | None:
        """The seconds that a test is expected to take; None if unknown."""
        return self._seconds.get(str(test))

    def record(self, finished: Iterable[FinishedTest]) -> None:
        """Stores the durations of these tests for later runs."""
        took = {str(one.test.id): one.last.seconds for one in finished if one.last.outcome in REPRESENTATIVE}
        if took:
            self._remembered.update(lambda seconds: _blend(seconds, took))


def _is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


def _blend(seconds: dict[str, Any], took: Mapping[str, float]) -> None:
    """Stores the mean of the old and the new duration, so that a single slow run neither dominates nor persists."""
    for test, now in took.items():
        seconds[test] = round((seconds.get(test, now) + now) / 2, 3)


class LastFailed:
    """The tests that failed in their last run."""

    def __init__(self, folder: Path, warn: Warn):
        self._remembered = Remembered(folder, "failed", lambda value: value is True, warn)
        self._failed = frozenset(self._remembered.load())

    def __bool__(self) -> bool:
        return bool(self._failed)

    def failed(self, test: TestId) -> bool:
        """Whether the test failed. If its file could not be imported, all tests of the file count as failed."""
        return str(test) in self._failed or test.file in self._failed

    def record(self, summary: Summary, discovered: Iterable[TestId]) -> None:
        """`discovered` are all tests of the imported files: other tests of these files no longer exist."""
        discovered = frozenset(discovered)
        files = {test.file for test in discovered}
        failed = {str(one.test.id) for one in summary.failures}
        finished = {str(one.test.id) for one in summary.finished}
        existing = {str(test) for test in discovered}

        def change(known: dict[str, Any]) -> None:
            for test in list(known):
                if test in finished or (test.partition("::")[0] in files and test not in existing):
                    del known[test]
            known.update(dict.fromkeys(failed, True))

        if finished:
            self._remembered.update(change)
