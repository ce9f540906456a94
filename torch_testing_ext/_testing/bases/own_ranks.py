"""Ranks that a test class starts itself, as processes of multiprocessing: waited for, killed, and reported like ours.

A class does so by overriding `_start_processes`. Such a rank has no account: its exit code says how its test ended,
and its pipe the exception.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch_testing_ext import launch
from torch_testing_ext._testing.marks.needs import SKIP_BY_CODE
from torch_testing_ext.launch import RankAccount, RankEnding, RankReport
from torch_testing_ext.launch.watching.evidence import RankEvidence
from torch_testing_ext.launch.watching.rules import FOREIGN_PROCESSES, RankWatch, WatchAction

# Keeps these frames out of tracebacks: the message is complete.
__unittest = True
# The same in pytest.
__tracebackhide__ = True


def wait_for(
    processes: Sequence[Any],
    pipes: Mapping[int, Any],
    timeout: float | None,
    expected: launch.Expected,
    on_timeout: Callable[[], None],
) -> RankEvidence:
    """Wait for processes, and end those that do not end.

    `pipes`: from the ranks, by the numbers of their processes. `on_timeout` is called before their end.
    """
    ranks = _OwnProcesses(processes, pipes, timeout, expected)
    try:
        ranks.wait()
        if ranks.state.timed_out:
            on_timeout()
    finally:
        ranks.end()
    reports = tuple(ranks.report(rank) for rank in range(len(processes)))
    return RankEvidence(reports, ranks.state.timed_out, expected)


def end_own_ranks(processes: Sequence[Any]) -> None:
    """Kill the processes that are left: SIGTERM, then SIGKILL."""
    _OwnProcesses(processes, {}).end()


class _OwnProcesses:
    """Processes whose ends are awaited."""

    def __init__(
        self,
        processes: Sequence[Any],
        pipes: Mapping[int, Any],
        timeout: float | None = None,
        expected: launch.Expected | None = None,
    ):
        """`pipes`: from the ranks, by the numbers of their processes."""
        self.began = launch.now()
        self.state = RankWatch(range(len(processes)), FOREIGN_PROCESSES, expected, self.began, timeout)
        self._processes = processes
        self._open: dict[int, multiprocessing.connection.Connection] = {}
        for rank, process in enumerate(processes):
            pipe = pipes.get(process.pid)
            if isinstance(pipe, multiprocessing.connection.Connection):
                self._open[rank] = pipe
        # The moment at which we began to end each process that was there.
        self._stopped: dict[int, float] = {}
        self._ends: dict[int, float] = {}
        self._texts: dict[int, str] = {}

    # -- until the test is over

    def wait(self) -> None:
        """Wait until all have ended, or for a while after one has failed."""
        # It moves on only when nothing else has happened.
        reached = self.began
        while True:
            step = self.state.step(reached)
            if step.action is not WatchAction.WAIT:
                return
            if self._wait_for_event(step.until):
                self._read_pipes()
                self._take_ends()
            else:
                reached = launch.now()

    def _wait_for_event(self, until: float | None) -> bool:
        seconds = None if until is None else max(0.0, until - launch.now())
        sentinels = [self._processes[rank].sentinel for rank in self.state.running]
        return bool(multiprocessing.connection.wait([*sentinels, *self._open.values()], seconds))

    def _take_ends(self) -> None:
        """Note the processes that have ended."""
        for rank in sorted(self.state.running):
            if self._processes[rank].exitcode is not None:
                self._ends[rank] = launch.now()
                self.state.on_end(self.report(rank), self._ends[rank])
                self.state.on_exit(rank)

    def _read_pipes(self) -> None:
        """Take the texts of exceptions, so that no rank waits for room in its pipe."""
        for rank, pipe in tuple(self._open.items()):
            try:
                while pipe.poll():
                    value = pipe.recv()
                    if isinstance(value, str):
                        self._texts[rank] = value
            except (EOFError, OSError):
                del self._open[rank]

    # -- the end of those that are left

    def end(self) -> None:
        """Kill the processes that are left."""
        self._stopped = dict.fromkeys(self._alive(), launch.now())
        self.state.give_up()
        while True:
            self._take_exits()
            step = self.state.step(launch.now())
            match step.action:
                case WatchAction.END:
                    self._send(signal.SIGTERM)
                    self.state.on_terminated(launch.now())
                case WatchAction.KILL:
                    self._send(signal.SIGKILL)
                    self.state.on_killed()
                case WatchAction.WAIT:
                    self._wait_for_exit(step.until)
                case _:
                    return

    def _alive(self) -> list[int]:
        return [rank for rank, process in enumerate(self._processes) if process.is_alive()]

    def _take_exits(self) -> None:
        for rank in self.state.alive.difference(self._alive()):
            self.state.on_exit(rank)

    def _send(self, number: int) -> None:
        for rank in self._alive():
            # One that is no child of this process may just have ended.
            with suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid, number)

    def _wait_for_exit(self, until: float | None) -> None:
        for rank in self._alive():
            self._processes[rank].join(None if until is None else max(0.0, until - launch.now()))

    # -- reports

    def report(self, rank: int) -> RankReport:
        self._read_pipes()
        code = self._processes[rank].exitcode
        ended = self._ends.get(rank, launch.now())
        account = self._account(rank, code, ended)
        exit = launch.Exit(_status(code), ended)
        return launch.assemble_report(rank, account, exit, self.began, self._stopped.get(rank))

    def _account(self, rank: int, code: int | None, at: float) -> RankAccount | None:
        if code == 0:
            return RankAccount(RankEnding.PASSED, self.began, at)
        if code in SKIP_BY_CODE:
            return RankAccount(RankEnding.SKIPPED, self.began, at, SKIP_BY_CODE[code].message, code=code)
        text = self._texts.get(rank)
        if code == launch.ERROR_EXIT_CODE and text:
            summary = text.strip().splitlines()[-1]
            error = launch.RaisedError(cause=launch.cause_in(summary))
            return RankAccount(RankEnding.ERROR, self.began, at, summary, text, code, error=error)
        return None


def _status(code: int | None) -> int:
    """The wait status for an exit code of multiprocessing."""
    if code is None:
        return 0
    return -code if code < 0 else code << 8
