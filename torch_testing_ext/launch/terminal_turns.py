"""Decides which rank of a run has the user's terminal. The others, and all time-outs, wait for it.

The rank that has it holds the lock of a file in the folder of the run. The file's time is that of the last change.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_testing_ext._process import locks
from torch_testing_ext._process.terminal import UserTerminal
from torch_testing_ext.launch.accounts import now

# Between two looks at whether it is this rank's turn.
_PAUSE = 0.05


@dataclass
class StopContext:
    """The facts that a process needs to stop for the user, and its debugger, once it has stopped."""

    terminal: UserTerminal
    # The folder of the run.
    directory: Path
    # None: this process is no rank.
    rank: int | None = None
    world_size: int = 1
    # It has called breakpoint(), and will wait for the terminal.
    is_about_to_stop: bool = False
    # A `RankDebugger`.
    debugger: Any = None

    def __str__(self) -> str:
        return "" if self.rank is None else f" in rank {self.rank} of {self.world_size}"


class Turns:
    """The turns of one rank."""

    def __init__(self, directory: Path, rank: int):
        self._directory = directory
        self._rank = rank
        # The rank that gets it next, if the user has said so.
        self._wanted = directory / "terminal.next"
        self._lock = os.open(directory / "terminal", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def take(self) -> bool:
        """Wait for the terminal. Returns whether this is its first use in the run."""
        while not self._lock_if_next(None, self._rank):
            time.sleep(_PAUSE)
        return self._begin()

    def take_if_called(self) -> bool:
        """Take the terminal if the user has called for this rank, and no stop of it has answered meanwhile."""
        is_called = self._lock_if_next(self._rank)
        if is_called:
            self._begin()
        return is_called

    def _lock_if_next(self, *ranks: int | None) -> bool:
        """Take the lock, and keep it if the user has called for one of these; None stands for no rank."""
        locks.lock(self._lock)
        if self._next() in ranks:
            return True
        locks.unlock(self._lock)
        return False

    def _begin(self) -> bool:
        self._wanted.unlink(missing_ok=True)
        is_first = os.fstat(self._lock).st_size == 0
        os.write(self._lock, b".")
        return is_first

    def leave(self) -> None:
        os.utime(self._lock)
        locks.unlock(self._lock)

    def give(self, rank: int) -> bool:
        """Let another rank have it next. Returns False if that has ended."""
        if not self._call(rank, b""):
            return False
        self._wanted.write_text(str(rank))
        self._call(rank, b".")
        self.leave()
        return True

    def _next(self) -> int | None:
        with suppress(OSError, ValueError):
            rank = int(self._wanted.read_text())
            return rank if self._call(rank, b"") else None
        return None

    def _call(self, rank: int, what: bytes) -> bool:
        """Write to the FIFO of a rank, which it has open as long as it is there."""
        try:
            fifo = os.open(fifo_of(self._directory, rank), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            os.write(fifo, what)
        finally:
            os.close(fifo)
        return True


def fifo_of(directory: Path, rank: int) -> Path:
    return directory / f"rank{rank}.terminal"


def open_fifo(directory: Path, rank: int) -> int:
    path = fifo_of(directory, rank)
    with suppress(FileExistsError):
        os.mkfifo(path, 0o600)
    return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)


def latest(directory: Path) -> float:
    """The time at which a rank of a run has had the terminal last: now, if one has it; 0 if none ever had."""
    try:
        lock = os.open(directory / "terminal", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0.0
    try:
        if locks.is_locked(lock):
            return now()
        return now() - max(0.0, time.time() - os.fstat(lock).st_mtime)
    finally:
        os.close(lock)
