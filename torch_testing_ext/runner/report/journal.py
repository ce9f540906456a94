"""The journal of a run: its events as they come, one line of JSON each.

A reporter writes it; `read_journal` makes the events again, from which all reports follow. The last line may be torn:
the run was killed while it was written. A run without a last event was interrupted: the tests without a result did
not finish.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from torch_testing_ext._process import locks, messages
from torch_testing_ext.runner import run_again
from torch_testing_ext.runner.events import (
    AttemptEnded,
    Collected,
    Event,
    Output,
    RunBegan,
    RunEnded,
    StatusRequested,
    Stopping,
    TestBegan,
    TestFinished,
    TestIsSlow,
    UnitBegan,
    UnitEnded,
    WaitingForDevices,
    Warned,
)
from torch_testing_ext.runner.model import Attempt, FinishedTest, Policy, Summary, Test, TestEnd, TestId
from torch_testing_ext.runner.options import Options

JOURNAL_FORMAT = "torch_testing_ext journal 5"
# The fourth lacks what the options leave out, and what only the console shows.
_SAME_RECORDS = (JOURNAL_FORMAT, "torch_testing_ext journal 4")
# In the second format, failures are texts only. Until the third one, an attempt had the fields of its end itself.
_OLDER = ("torch_testing_ext journal 3", "torch_testing_ext journal 2")
NAME = "journal.jsonl"
# Journals of earlier runs in a folder.
KEPT = 10


@dataclass(frozen=True)
class JournalHeader:
    """The first line: what reports need to know that is in no event."""

    format: str
    pid: int
    # Reruns a test whose name is appended.
    command: str
    policy: Policy
    allow_all_skipped: bool


@dataclass(frozen=True)
class JournalEnd:
    """The last line: the summary without its finished tests, which the lines before it have."""

    summary: Summary
    finished: int


def header_of(options: Options) -> JournalHeader:
    return JournalHeader(
        JOURNAL_FORMAT, os.getpid(), run_again.command(options), options.policy, options.allow_all_skipped
    )


_FOR_CONSOLE = (TestIsSlow, Output, StatusRequested, WaitingForDevices)
_RECORDED = (
    *(Collected, RunBegan, UnitBegan, TestBegan, AttemptEnded, TestFinished, UnitEnded, Warned, Stopping),
    *_FOR_CONSOLE,
)
# What no report of a run that is over has, and what a reader of results can do without, too.
WHILE_RUNNING = (TestBegan, *_FOR_CONSOLE)
OF_UNITS = (UnitBegan, UnitEnded, *WHILE_RUNNING)
_KINDS = {kind.__name__: kind for kind in (JournalHeader, *_RECORDED, JournalEnd)}


class JournalError(Exception):
    """A journal that cannot be read; the message says why."""


# -- writing


@dataclass
class Journal:
    """Writes the journal. If that fails, it warns once and the run continues without."""

    path: Path
    header: JournalHeader
    warn: Callable[[str], object]
    # Makes the folder in which the journal's own folder will be.
    prepare: Callable[[], object] = lambda: None
    _fd: int | None = None
    _size: int = 0
    _was_opened: bool = False

    def on_event(self, event: Event) -> None:
        match event:
            case Collected() | RunBegan():
                self._open()
                self._write(event)
            case TestFinished(finished):
                # Which another line has in full.
                last = finished.last
                named = Attempt(last.test, TestEnd(last.outcome), repetition=last.repetition, number=last.number)
                self._write(replace(event, finished=FinishedTest((named,))))
            case RunEnded(summary):
                self._write(JournalEnd(replace(summary, finished=()), len(summary.finished)))
                self._close()
            case _ if isinstance(event, _RECORDED):
                self._write(event)

    def _open(self) -> None:
        if self._was_opened:
            return
        self._was_opened = True
        try:
            self.prepare()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            # As long as this process lives.
            if not locks.try_lock(self._fd):
                return self._give_up("another run is writing to it")
            # A journal that was there; a device or a pipe cannot be truncated.
            if os.fstat(self._fd).st_size:
                os.ftruncate(self._fd, 0)
        except OSError as error:
            self._give_up(error)
        else:
            self._write(self.header)

    def _write(self, record: Any) -> None:
        if self._fd is None:
            return
        line = messages.to_json(record).encode() + b"\n"
        try:
            rest = line
            while rest:
                rest = rest[os.write(self._fd, rest) :]
            self._size += len(line)
        except OSError as error:
            with suppress(OSError):
                # What is there stays whole.
                os.ftruncate(self._fd, self._size)
            self._give_up(error)

    def _give_up(self, why: object) -> None:
        self._close()
        self.warn(f"{self.path}: no more results are saved there ({why}); reports are not affected")

    def _close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


def place_of_new(folder: Path) -> Path:
    """The path for the journal of a run that begins now, for which old ones make room."""
    _delete_old(folder)
    now = datetime.now(timezone.utc)
    return folder / f"{now:%Y-%m-%dT%H.%M.%S}.{now.microsecond:06}-{os.getpid()}" / NAME


def _delete_old(folder: Path) -> None:
    """Delete all but the newest journals, except those of runs that go on."""
    for path in sorted(folder.glob(f"*/{NAME}"), reverse=True)[KEPT:]:
        with suppress(OSError), path.open("rb") as file:
            if locks.try_lock(file):
                path.unlink()
                path.parent.rmdir()


# -- reading


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
    return messages.from_json(line, _KINDS)


def _old_record(line: bytes) -> Any:
    """The record on a line of an older format."""
    ((name, values),) = json.loads(line).items()
    match name:
        case AttemptEnded.__name__:
            _add_end(values["attempt"])
        case TestFinished.__name__:
            for attempt in values["finished"]["attempts"]:
                _add_end(attempt)
    return messages.decode(_KINDS[name], values)


def _add_end(attempt: dict[str, Any]) -> None:
    """Move the fields of the end of an attempt to a record of their own."""
    names = [part.name for part in fields(TestEnd) if part.name in attempt]
    attempt["end"] = {name: attempt.pop(name) for name in names}


def _header(path: Path, lines: list[bytes]) -> JournalHeader:
    try:
        ((kind, values),) = json.loads(lines[0]).items()
        written = values["format"]
    except (IndexError, ValueError, KeyError, TypeError, AttributeError):
        raise JournalError(f"{path} is not the journal of a run") from None
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
