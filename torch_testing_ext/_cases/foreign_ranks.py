"""Ranks that a test starts itself, as processes of multiprocessing: waited for, ended, and judged like ours.

A class does so by overriding `_start_processes`. Such a rank has no account: its exit code says how its test ended, and
its pipe the exception.
"""

import multiprocessing.connection
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch_testing_ext import launch
from torch_testing_ext._marks.needs import SKIP_BY_CODE
from torch_testing_ext._process import grace, reaping
from torch_testing_ext.launch import RankAccount, RankEnding, RankReport

__unittest = True


def verdict(
    processes: Sequence[Any],
    pipes: Mapping[int, Any],
    timeout: float | None,
    expected: launch.Expected,
    case: launch.Case,
    on_timeout: Callable[[], None],
) -> launch.Verdict:
    """Wait for these processes, end those that do not end, and judge all. `on_timeout` is called before the end."""
    watched = _Watched(processes, pipes, expected)
    deadline = None if timeout is None else watched.began + timeout
    try:
        timed_out = watched.wait(deadline)
        if timed_out:
            on_timeout()
    finally:
        watched.stopped = [rank for rank, process in enumerate(processes) if process.is_alive()]
        end(processes)
    from torch_testing_ext.launch.judging import judge

    return judge([watched.report(rank) for rank in range(len(processes))], timed_out, case, expected)


def end(processes: Sequence[Any]) -> None:
    """End the processes that are left: SIGTERM, then SIGKILL."""
    living = [process for process in processes if process.is_alive()]

    def have_ended(seconds: float) -> bool:
        until = launch.now() + seconds
        for process in living:
            process.join(max(0.0, until - launch.now()))
        return not any(process.is_alive() for process in living)

    def send(number: int) -> None:
        for process in living:
            if process.is_alive():
                with suppress(ProcessLookupError):  # it is not a child of this process, and has just ended
                    os.kill(process.pid, number)

    reaping.escalate(have_ended, send, after_sigterm=grace.AFTER_SIGTERM)
    for process in living:
        process.join()


class _Watched:
    """Processes whose ends are awaited."""

    def __init__(self, processes: Sequence[Any], pipes: Mapping[int, Any], expected: launch.Expected):
        self.began = launch.now()
        self.stopped: list[int] = []
        self._processes = processes
        found = {rank: pipes.get(process.pid) for rank, process in enumerate(processes)}
        self._open = {
            rank: pipe for rank, pipe in found.items() if isinstance(pipe, multiprocessing.connection.Connection)
        }
        self._expected = expected
        self._ends: dict[int, float] = {}
        self._texts: dict[int, str] = {}

    def wait(self, deadline: float | None) -> bool:
        """Wait until all have ended, or for a while after one has failed. Return whether the deadline is over."""
        until = deadline
        while pending := [process for rank, process in enumerate(self._processes) if rank not in self._ends]:
            left = None if until is None else max(0.0, until - launch.now())
            events = [*(process.sentinel for process in pending), *self._open.values()]
            if not multiprocessing.connection.wait(events, left):
                return until == deadline
            self._read_pipes()
            if self._take_ends():
                ends = launch.now() + grace.AFTER_FAILURE
                until = ends if until is None else min(until, ends)
        return False

    def _take_ends(self) -> bool:
        """Note the processes that have ended. Return whether one of them makes the test fail."""
        new = [
            rank
            for rank, process in enumerate(self._processes)
            if rank not in self._ends and process.exitcode is not None
        ]
        self._ends.update(dict.fromkeys(new, launch.now()))
        return any(self._expected.decides(self.report(rank)) for rank in new)

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

    def report(self, rank: int) -> RankReport:
        self._read_pipes()
        code = self._processes[rank].exitcode
        stopped = self._ends.get(rank, launch.now()) if rank in self.stopped else None
        status = 0 if code is None else -code if code < 0 else code << 8
        ended = launch.Exit(status, self._ends.get(rank, launch.now()))
        return launch.assemble_report(rank, self._account(rank, code, ended.at), ended, self.began, stopped)

    def _account(self, rank: int, code: int | None, at: float) -> RankAccount | None:
        if code == 0:
            return RankAccount(RankEnding.PASSED, self.began, at)
        if code in SKIP_BY_CODE:
            return RankAccount(RankEnding.SKIPPED, self.began, at, SKIP_BY_CODE[code].message, code=code)
        if code == launch.ERROR_EXIT_CODE and (text := self._texts.get(rank)):
            summary = text.strip().splitlines()[-1]
            return RankAccount(RankEnding.ERROR, self.began, at, summary, text, code, cause=launch.cause_in(summary))
        return None
