"""Data that one run keeps for the next: durations and failures.

Nothing here can fail a run: a file that cannot be read or written causes a warning and counts as empty.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch_testing_ext._process import locks
from torch_testing_ext._process.files import write_atomically
from torch_testing_ext._tests.kept_failures import make_cache_folder
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.runner.model import FinishedTest, Summary, TestId
from torch_testing_ext.runner.options import Options

REMEMBERED_FORMAT = "torch_testing_ext 1"
# Outcomes whose duration is representative.
REPRESENTATIVE = (TestOutcome.PASSED, TestOutcome.EXPECTED_FAILURE)
Warn = Callable[[str], None]


class EarlierRuns:
    """Data that earlier runs have left for this one. Files that cannot be read or written cause warnings."""

    def __init__(self, options: Options):
        self.warnings: list[str] = []
        self.durations = Durations(options.cache, self.warnings.append)
        self.last_failed = LastFailed(options.cache, self.warnings.append)
        self._is_shard = options.shard is not None

    @property
    def know_nothing(self) -> bool:
        return self.durations.is_empty

    def know(self, test: TestId) -> bool:
        """Whether any of them has run this test to its end."""
        return self.durations.expected(test) is not None or self.last_failed.failed(test)

    def record(self, summary: Summary, discovered: Iterable[TestId]) -> None:
        """A shard records no durations: that would change how the tests are split for the shards that run after it."""
        if not self._is_shard:
            self.durations.record(summary.finished)
        self.last_failed.record(summary, discovered)


class Remembered:
    """A JSON file with one value per test."""

    def __init__(self, folder: Path, name: str, is_value: Callable[[Any], bool], warn: Warn):
        """`folder`: of the cache. `name`: of the file, and of the folder there that it is in."""
        self._folder = folder
        self._file = folder / f"{name}.json"
        self._is_value = is_value
        self._warn = warn

    def load(self) -> dict[str, Any]:
        """The value of each test; empty if the file is missing or invalid."""
        try:
            return self._checked(json.loads(self._file.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            self._warn(f"{self._file} is ignored: {error or type(error).__name__}")
            return {}

    def update(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Applies `change` to the current content, which another run may have updated meanwhile, in one step."""
        try:
            with self._locked():
                values = self.load()
                change(values)
                content = {"format": REMEMBERED_FORMAT, "tests": dict(sorted(values.items()))}
                write_atomically(self._file, json.dumps(content, indent=0))
        except OSError as error:
            self._warn(f"{self._file} was not updated: {error}")

    def _checked(self, content: Any) -> dict[str, Any]:
        if not isinstance(content, dict) or content.get("format") != REMEMBERED_FORMAT:
            raise ValueError(f"its format is not {REMEMBERED_FORMAT!r}")
        tests = content.get("tests")
        if not isinstance(tests, dict):
            raise ValueError("its values for tests are invalid")
        for value in tests.values():
            if not self._is_value(value):
                raise ValueError("its values for tests are invalid")
        return tests

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Locks a separate file, since the file itself is replaced. The lock ends with the process that holds it."""
        make_cache_folder(self._folder)
        self._file.parent.mkdir(exist_ok=True)
        with locks.open_locked(self._file.with_suffix(".lock"), "w"):
            yield


class Durations:
    """The recorded durations of tests. What a run records takes effect in the next run."""

    def __init__(self, folder: Path, warn: Warn):
        self._remembered = Remembered(folder, "durations", _is_duration, warn)
        self._seconds: Mapping[str, float] = self._remembered.load()

    @property
    def is_empty(self) -> bool:
        return not self._seconds

    def expected(self, test: TestId) -> float | None:
        """The seconds that a test is expected to take; None if unknown."""
        return self._seconds.get(str(test))

    def record(self, finished: Iterable[FinishedTest]) -> None:
        """Stores the durations of these tests for later runs."""
        took: dict[str, float] = {}
        for result in finished:
            attempt = result.last
            if attempt.outcome in REPRESENTATIVE:
                took[str(result.test.id)] = attempt.seconds
        if took:
            self._remembered.update(lambda seconds: _blend(seconds, took))


def _is_duration(value: object) -> bool:
    # No subclass: a bool is an int.
    if type(value) is int or type(value) is float:
        return 0 <= value < math.inf
    return False


def _blend(seconds: dict[str, Any], took: Mapping[str, float]) -> None:
    """Stores the mean of the old and the new duration, so that a single slow run neither dominates nor persists."""
    for test, now in took.items():
        before = seconds.get(test, now)
        mean = (before + now) / 2
        seconds[test] = round(mean, 3)


class LastFailed:
    """The tests that failed in their last run."""

    def __init__(self, folder: Path, warn: Warn):
        self._remembered = Remembered(folder, "failed", lambda value: value is True, warn)
        self._failed = frozenset(self._remembered.load())

    def has_failures(self, file: str) -> bool:
        """Whether any test of the file failed in its last run."""
        if file in self._failed:
            return True
        beginning = f"{file}::"
        return any(name.startswith(beginning) for name in self._failed)

    def failed(self, test: TestId) -> bool:
        """Whether the test failed. If its file could not be imported, all tests of the file count as failed."""
        return str(test) in self._failed or test.file in self._failed

    def record(self, summary: Summary, discovered: Iterable[TestId]) -> None:
        """`discovered` are all tests of the imported files: other tests of files that have some no longer exist."""
        failed = {str(result.test.id) for result in summary.failures}
        finished = {str(result.test.id) for result in summary.finished}
        existing = set()
        files = set()
        for test in discovered:
            existing.add(str(test))
            # A file that is broken or skips itself has no test.
            if test.method:
                files.add(test.file)

        def change(known: dict[str, Any]) -> None:
            for test in list(known):
                file = test.partition("::")[0]
                is_gone = file in files and test not in existing
                if test in finished or is_gone:
                    del known[test]
            known.update(dict.fromkeys(failed, True))

        if finished:
            self._remembered.update(change)
