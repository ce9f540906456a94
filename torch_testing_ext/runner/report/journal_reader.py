"""The reading of a journal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from torch_testing_ext._process import locks, messages
from torch_testing_ext.runner.events import (
    AttemptEnded,
    Event,
    RunBegan,
    RunEnded,
    TestBegan,
    TestFinished,
    UnitBegan,
    UnitEnded,
    Warned,
)
from torch_testing_ext.runner.model import Attempt, FinishedTest, Summary, Test, TestEnd, TestId

from .journal import JOURNAL_FORMAT, KINDS, NAME, JournalEnd, JournalError, JournalHeader

# The fourth lacks what the options leave out, and what only the console shows.
_SAME_RECORDS = (JOURNAL_FORMAT, "torch_testing_ext journal 4")
# In the second format, failures are texts only. Until the third one, an attempt had the fields of its end itself.
_OLDER = ("torch_testing_ext journal 3", "torch_testing_ext journal 2")


@dataclass(frozen=True)
class RecordedRun:
    """The content of a journal: the events of a run, of which the last is always its end."""

    header: JournalHeader
    events: tuple[Event, ...]
    summary: Summary


def find_journal(place: Path) -> Path:
    """The journal that a path names: a file, the folder of a run, or a folder of runs, of which the newest counts."""
    if not place.is_dir():
        if not place.exists():
            raise JournalError(f"{place} does not exist")
        return place
    for pattern in (NAME, f"*/{NAME}", f"runs/*/{NAME}", "*.jsonl"):
        if paths := sorted(place.glob(pattern)):
            return paths[-1]
    raise JournalError(f"{place} contains no {NAME}")


def read_journal(path: Path) -> RecordedRun:
    """Read a journal. Raises JournalError if it is none."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise JournalError(f"{path} cannot be read: {error}") from None
    return run_of(content, path, goes_on=_is_locked(path))


def run_of(content: bytes, path: Path, *, goes_on: bool = False, without: tuple[type, ...] = ()) -> RecordedRun:
    """The run that the content of a journal records; `path` names it. Raises JournalError if it is none.

    `without`: events that the reader does not need, most of which are long.
    """
    unread = tuple(f'{{"{kind.__name__}": '.encode() for kind in without)
    *lines, torn = content.split(b"\n")
    damaged = [f"line {len(lines) + 1} is incomplete"] if torn else []
    header = _header(path, lines)
    read_record = _old_record if header.format in _OLDER else _record
    records = []
    with messages.sharing():
        for number, line in enumerate(lines[1:], 2):
            if unread and line.startswith(unread):
                continue
            try:
                records.append(read_record(line))
            except (ValueError, KeyError, TypeError, AttributeError):
                damaged.append(f"line {number} is not readable")
    if not any(isinstance(record, RunBegan) for record in records):
        raise JournalError(f"{path} ends before its run began")
    return _Reader(path, header, records, damaged, goes_on).run()


def _record(line: bytes) -> Any:
    return messages.from_json(line, KINDS)


def _old_record(line: bytes) -> Any:
    """The record on a line of an older format."""
    ((name, values),) = json.loads(line).items()
    match name:
        case AttemptEnded.__name__:
            _add_end(values["attempt"])
        case TestFinished.__name__:
            for attempt in values["finished"]["attempts"]:
                _add_end(attempt)
    return messages.decode(KINDS[name], values)


def _add_end(attempt: dict[str, Any]) -> None:
    """Move the fields of the end of an attempt to a record of their own."""
    names = [part.name for part in fields(TestEnd) if part.name in attempt]
    attempt["end"] = {name: attempt.pop(name) for name in names}


def _header(path: Path, lines: list[bytes]) -> JournalHeader:
    try:
        ((kind, values),) = json.loads(lines[0]).items()
        written = values["format"]
    except (IndexError, ValueError, KeyError, TypeError, AttributeError):
        raise JournalError(
            f"{path} is not the journal of a run, a file journal.jsonl in .torch_testing_ext/runs. Without a name, the "
            "latest run is taken"
        ) from None
    if kind != JournalHeader.__name__ or written not in (*_SAME_RECORDS, *_OLDER):
        raise JournalError(f"{path} has the format {written!r}; this version reads {JOURNAL_FORMAT!r}")
    header: JournalHeader = messages.decode(JournalHeader, values)
    return header


def _is_locked(path: Path) -> bool:
    with suppress(OSError), path.open("rb") as file:
        return locks.is_locked(file)
    return False


@dataclass
class _Reader:
    """Turns the records of a journal into the events of the run."""

    path: Path
    header: JournalHeader
    records: list[Any]
    damaged: list[str]
    goes_on: bool
    _attempts: dict[tuple[TestId, int], list[Attempt]] = field(default_factory=dict)
    _finished: list[FinishedTest] = field(default_factory=list)
    _end: JournalEnd | None = None

    def run(self) -> RecordedRun:
        events = [event for record in self.records for event in self._event(record)]
        # Whose end the journal does not have: the last attempt counts.
        for test, repetition in list(self._attempts):
            events += self._finish(test, repetition)
        summary = self._summary()
        return RecordedRun(self.header, (*events, RunEnded(summary)), summary)

    def _event(self, record: Any) -> Iterator[Event]:
        match record:
            case JournalEnd():
                self._end = record
            case AttemptEnded(attempt):
                self._attempts.setdefault((attempt.test.id, attempt.repetition), []).append(attempt)
                yield record
            case TestFinished(finished):
                yield from self._finish(finished.test.id, finished.last.repetition)
            case _:
                yield record

    def _finish(self, test: TestId, repetition: int) -> Iterator[Event]:
        attempts = self._attempts.pop((test, repetition), None)
        if attempts:
            self._finished.append(FinishedTest(tuple(attempts)))
            yield TestFinished(self._finished[-1])

    def _summary(self) -> Summary:
        if self._end is not None:
            summary = replace(self._end.summary, finished=tuple(self._finished))
            if self._end.finished != len(self._finished):
                self.damaged.append(f"{self._end.finished} tests finished, it has {len(self._finished)}")
            error = f"{self.path} is damaged: {'; '.join(self.damaged)}" if self.damaged else ""
            return replace(summary, error=summary.error or error)
        how = "goes on" if self.goes_on else "was killed"
        return Summary(
            tuple(self._finished),
            self._seconds(),
            self.header.policy,
            interrupted=True,
            unfinished=self._unfinished(),
            warnings=(
                f"the run {how}: {self.path} is incomplete; these are the results so far",
                *(f"{self.path}: {what}" for what in self.damaged),
                *(record.text for record in self.records if isinstance(record, Warned)),
            ),
        )

    def _unfinished(self) -> tuple[Test, ...]:
        began = next(record for record in self.records if isinstance(record, RunBegan))
        done = {(finished.test.id, finished.last.repetition) for finished in self._finished}
        planned = [(test, unit.repetition) for unit in began.units for test in unit.tests]
        in_units = {test.id for test, _ in planned}
        planned += [(test, 0) for test in began.tests if test.id not in in_units]
        return tuple(dict.fromkeys(test for test, repetition in planned if (test.id, repetition) not in done))

    def _seconds(self) -> float:
        moments = [record.at for record in self.records if isinstance(record, (UnitBegan, TestBegan, UnitEnded))]
        moments += [test.last.began + test.last.seconds for test in self._finished]
        return max(moments, default=0.0)
