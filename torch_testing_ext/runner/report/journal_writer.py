"""The writing of a journal."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from torch_testing_ext._process import locks, messages
from torch_testing_ext.runner.events import Collected, Event, RunBegan, RunEnded, TestFinished
from torch_testing_ext.runner.model import Attempt, FinishedTest, TestEnd

from .journal import KEPT, NAME, RECORDED, JournalEnd, JournalHeader


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
                # Another line has it in full.
                last = finished.last
                named = Attempt(last.test, TestEnd(last.outcome), repetition=last.repetition, number=last.number)
                self._write(replace(event, finished=FinishedTest((named,))))
            case RunEnded(summary):
                self._write(JournalEnd(replace(summary, finished=()), len(summary.finished)))
                self._close()
            case _ if isinstance(event, RECORDED):
                self._write(event)

    def _open(self) -> None:
        if self._was_opened:
            return
        self._was_opened = True
        try:
            self.prepare()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            # The lock is kept as long as this process lives.
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
