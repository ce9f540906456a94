"""How long tests took, and which failed: what a run learns from those before it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..model import FinishedTest, Summary, TestId, TestOutcome
from .remembered import Remembered, Warn

# Outcomes that say how long the test takes when nothing is wrong with it.
TELLING = (TestOutcome.PASSED, TestOutcome.EXPECTED_FAILURE)


class Durations:
    """Seconds by test, as they were when the run began; what is learnt goes to the file alone."""

    def __init__(self, folder: Path, warn: Warn):
        self._remembered = Remembered(folder, "durations", _is_seconds, warn)
        self._seconds: Mapping[str, float] = self._remembered.load()

    def expected(self, test: TestId) -> float | None:
        return self._seconds.get(str(test))

    @property
    def fingerprint(self) -> str:
        """Tells apart what shards were cut by: all shards must have the same."""
        return hashlib.sha256(repr(sorted(self._seconds.items())).encode()).hexdigest()[:8]

    def learn(self, settled: Iterable[FinishedTest]) -> None:
        took = {str(one.test.id): one.last.seconds for one in settled if one.last.outcome in TELLING}
        if took:
            self._remembered.update(lambda seconds: _blend(seconds, took))


def _is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


def _blend(seconds: dict[str, Any], took: Mapping[str, float]) -> None:
    """The mean of what was known and what was seen: one slow day is soon forgotten, and does not count for all."""
    for test, now in took.items():
        seconds[test] = round((seconds.get(test, now) + now) / 2, 3)


class LastFailed:
    """The tests that failed when they ran last."""

    def __init__(self, folder: Path, warn: Warn):
        self._remembered = Remembered(folder, "failed", lambda value: value is True, warn)
        self._failed = frozenset(self._remembered.load())

    def __bool__(self) -> bool:
        return bool(self._failed)

    def failed(self, test: TestId) -> bool:
        """A file that could not be imported stands for all its tests."""
        return str(test) in self._failed or test.file in self._failed

    def learn(self, summary: Summary, there: Iterable[TestId]) -> None:
        """`there` are the tests that exist in the files that were looked into: what else these had is gone."""
        there = frozenset(there)
        files = {test.file for test in there}
        failed = {str(one.test.id) for one in summary.failures}
        settled = {str(one.test.id) for one in summary.settled}
        here = {str(test) for test in there}

        def change(known: dict[str, Any]) -> None:
            for test in list(known):
                if test in settled or (test.partition("::")[0] in files and test not in here):
                    del known[test]
            known.update(dict.fromkeys(failed, True))

        if settled:
            self._remembered.update(change)
