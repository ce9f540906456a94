"""Ranks that stay: they carry out one order after another, until they are told to leave.

Orders go through a named pipe to each rank; a common one, the bell, tells the parent which rank is done with which
order. How an order ended stands in a file, as for any rank: a pipe only wakes. An answer to another order than the
present one counts for nothing. As soon as an order goes wrong all ranks are ended: what they share is in doubt.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from . import client
from .job import Job
from .rank import AccountWriter
from .report import AccountFile, Exit, RankAccount, RankEnding, now, read_account
from .verdict import Expected
from .watch import RankWatcher, WatchResult, watch

_RING = struct.Struct("=II")  # rank, number of the order. So short that writing it is atomic.
_LEAVE = 0  # the number of no order


def _pipe(directory: Path, name: str) -> Path:
    """A named pipe; made by whoever comes first, parent or rank."""
    path = directory / name
    with suppress(FileExistsError):
        os.mkfifo(path, 0o600)
    return path


def _orders(directory: Path, rank: int) -> Path:
    return _pipe(directory, f"rank{rank}.orders")


def _bell(directory: Path) -> Path:
    return _pipe(directory, "bell")


def _account(directory: Path, rank: int, number: int) -> Path:
    return directory / f"rank{rank}.account{number}"


# -- a rank's side


@dataclass
class Task:
    """`what` is to be done; `report` takes how it ended. `path`: for files about it, the same in all ranks."""

    what: str
    report: AccountWriter
    path: Path


def tasks(directory: Path, rank: int) -> Iterator[Task]:
    """In a rank: the orders, one by one. To ask for the next says that the one before is done."""
    bell = os.open(_bell(directory), os.O_WRONLY | os.O_CLOEXEC)
    with open(_orders(directory, rank)) as lines:
        for line in lines:
            number, _, what = line.rstrip("\n").partition(" ")
            if int(number) == _LEAVE:
                return
            pen = AccountFile.open(_account(directory, rank, int(number)))
            report = AccountWriter(pen)
            try:
                yield Task(what, report, directory / f"order{number}")
            finally:
                pen.close()
            os.write(bell, _RING.pack(rank, int(number)))
            if report.account is not None and report.account.ending.is_failure:
                sys.exit(report.account.code)  # others may wait for us in a collective: let them see that we are gone


# -- the parent's side


class PersistentRanks:
    """Starts the ranks of `job`, whose body goes through its `orders`. Raises client.CannotStart."""

    def __init__(self, job: Job):
        self.directory = job.directory
        self.run = client.launch(job)
        # For reading too: so opening waits for nobody, and writing to a rank that is gone raises nothing.
        self._pipes = [os.open(_orders(self.directory, rank), os.O_RDWR | os.O_CLOEXEC) for rank in self._ranks()]
        self._bell = os.open(_bell(self.directory), os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self.number = 0
        self.last = ""  # what was ordered last
        self.is_busy = False
        self.is_over = False

    def _ranks(self) -> range:
        return range(self.run.job.world_size)

    def is_complete(self) -> bool:
        """Are all ranks there?"""
        while self.run.wait_for_news(until=now()):
            pass
        return not self.run.lost and len(self.run.alive) == len(self._ranks())

    def order(self, what: str) -> Path:
        """Have all ranks do this. Returns where files about it are."""
        self.number, self.last, self.is_busy = self.number + 1, what, True
        self._began = now()
        self._written = [_size(self.run.job.log(rank)) for rank in self._ranks()]
        self._tell(f"{self.number} {what}")
        return self.directory / f"order{self.number}"

    def _tell(self, line: str) -> None:
        for pipe in self._pipes:
            os.write(pipe, f"{line}\n".encode())

    def watch(self, timeout: float | None) -> WatchResult:
        """See the present order to its end. Where it goes wrong, the ranks are ended too."""
        watched = _WatchedOrder(self)
        went_well = False
        try:
            timed_out = watched.until_over(None if timeout is None else self._began + timeout)
            if watched.pending:
                watched.take_stacks()
            went_well = not watched.pending and watched.agreed()
        finally:
            self.is_busy = False
            if not went_well or not self.is_complete():
                watched.end_all()
                self._close()
        return WatchResult(watched.reports(), timed_out, now() - self._began)

    def heard(self) -> set[int]:
        """The ranks that have said since the last time that they are done with the present order."""
        done = set()
        with suppress(BlockingIOError):
            while rings := os.read(self._bell, 512 * _RING.size):
                done |= {rank for rank, number in _RING.iter_unpack(rings) if number == self.number}
        return done

    def dismiss(self, patience: float) -> WatchResult:
        """Let all ranks leave, and see to it that they do."""
        self._tell(f"{_LEAVE}")
        try:
            return watch(self.run, now() - self.run.began + patience, Expected())
        finally:
            self._close()

    def end(self) -> None:
        """End the ranks at once."""
        if not self.is_over:
            RankWatcher(self.run, Expected(), self.run.began).end_all()
            self._close()

    def _close(self) -> None:
        client.finish(self.run)
        self.is_over = True
        for fd in (*self._pipes, self._bell):
            os.close(fd)


class _WatchedOrder(RankWatcher):
    """Over is, besides who has exited, who has rung the bell."""

    def __init__(self, crew: PersistentRanks):
        super().__init__(crew.run, Expected(), crew._began, (crew._bell,))
        self._crew = crew

    def take_news(self) -> None:
        for rank in sorted(self._crew.heard() - self.accounts.keys()):
            account = read_account(_account(self._crew.directory, rank, self._crew.number))
            if account is not None:
                self.accounts[rank] = account
                self.answers[rank] = Exit(account.code << 8, account.ended)
                self.look_at(rank)
        super().take_news()

    def read_account(self, rank: int) -> RankAccount | None:
        """Who exited in the middle may have told in the order's account; in its own, if it did not get to any."""
        theirs = read_account(_account(self._crew.directory, rank, self._crew.number))
        return theirs or super().read_account(rank)

    def agreed(self) -> bool:
        """Have all passed, or all skipped?"""
        endings = {account and account.ending for account in self.accounts.values()}
        return endings in ({RankEnding.PASSED}, {RankEnding.SKIPPED})

    def log_start(self, rank: int) -> int:
        return self._crew._written[rank]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
