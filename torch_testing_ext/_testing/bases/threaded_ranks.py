"""Ranks that are threads of this process: started and joined together, and judged like processes.

A thread cannot be killed. One that does not end is asked to stop, as far as Python can do that, and then left behind as
a daemon; its later changes to process groups happen in a world that no other thread sees.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist

from torch_testing_ext import launch
from torch_testing_ext._collectives.findings.deadlocks import deadlocked, describe_deadlock, waiting_calls
from torch_testing_ext._collectives.findings.finding import Finding
from torch_testing_ext._collectives.findings.sanitizer_reports import finding_of_rank
from torch_testing_ext._collectives.sanitizer.sanitizer_kinds import SanitizeKind
from torch_testing_ext._testing.bases.threaded_group import (
    ThreadLocalWorld,
    _install_threaded_pg,
    _uninstall_threaded_pg,
    site_of_call,
)
from torch_testing_ext._torch.groups import thread_worlds
from torch_testing_ext.launch import RankEnding, RankReport, grace_periods, hang, now
from torch_testing_ext.launch.jobs import Sanitize
from torch_testing_ext.launch.watching.evidence import RankEvidence
from torch_testing_ext.launch.watching.rules import RankWatch, WatchAction, WatchRules

# The other ranks may run on after a failure. Those that wait for the failed rank in a collective end at once;
# a rank that computes cannot be ended, so it gets the chance to finish.
GRACE_AFTER_FAILURE = grace_periods.AFTER_FAILURE_FOR_GOOD
# The seconds for a thread to end after its account, or after it is asked to stop.
END_TIMEOUT = 0.5


# It is made in C++: the stubs do not have it.
_HashStore: Any = dist.HashStore  # type: ignore[attr-defined, unused-ignore]


class Stopped(BaseException):
    """Raised in a thread that is still running after the end of its test."""


# What a thread raised, as sys.exc_info() gives it.
ExcInfo = tuple[type[BaseException], BaseException, Any]


class RankThreads:
    """Runs `body(rank)` in `world_size` threads, once started; a body that communicates does so in `process_group`.

    `account_for` writes an exception that a body raised into the account of its rank, and returns the exit code.
    """

    def __init__(
        self,
        world_size: int,
        body: Callable[[int], None],
        account_for: Callable[[launch.AccountWriter, BaseException], int],
        sanitize: Sanitize | None = None,
    ):
        self.began = now()
        self._body = body
        self._account_for = account_for
        self._sharding_lock = thread_worlds.one_sharding_at_a_time()
        self._sharding_lock.__enter__()
        self._world: ThreadLocalWorld = _install_threaded_pg()
        # What must be known to run a test again.
        self.note = ""
        if sanitize:
            self._sanitize(sanitize, world_size)
        self.store = _HashStore()
        # The exceptions by rank.
        self.errors: dict[int, ExcInfo] = {}
        # The test whose threads these are.
        self.test: Any = None
        # The reason to give up waiting before the time-out.
        self.finding: Finding | None = None
        self._accounts = [launch.AccountWriter(None) for _ in range(world_size)]
        self._exits: dict[int, launch.Exit] = {}
        self.is_over = False
        self.threads = [
            threading.Thread(target=self._run_rank, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(world_size)
        ]
        for thread in self.threads:
            # Some have the thread alone.
            thread.ranks = self  # type: ignore[attr-defined]

    def _sanitize(self, sanitize: Sanitize, world_size: int) -> None:
        self._world.kinds = sanitize.kinds
        self.note = sanitize.note
        if sanitize.kinds & {SanitizeKind.WAITS, SanitizeKind.RACES}:
            self._follow_works(world_size)
        if sanitize.delays is not None:
            # Only where it is asked for.
            from torch_testing_ext._collectives.sanitizer import operation_checks

            self._world.delays = {rank: operation_checks.Delays(sanitize.delays, rank) for rank in range(world_size)}

    def _follow_works(self, world_size: int) -> None:
        # Only where it is asked for.
        from torch_testing_ext._collectives.sanitizer import thread_waits

        ranks = range(world_size)
        world = self._world
        world.waits = {rank: thread_waits.ThreadWaits(partial(world.note, rank), site_of_call) for rank in ranks}
        thread_waits.watch_waits(list(world.waits.values()))

    def start(self) -> None:
        try:
            for thread in self.threads:
                thread.start()
        except BaseException:
            self.end()
            raise

    # -- in the threads

    def _run_rank(self, rank: int) -> None:
        writer = self._accounts[rank]
        code = 0
        try:
            with self._following_waits(rank):
                self._body(rank)
            writer.passed()
        except BaseException as error:
            self.errors[rank] = (type(error), error, error.__traceback__)
            code = self._account_for(writer, error)
        finally:
            self._exits[rank] = _exit_of(writer, code)
            account = writer.account
            how = f"left by sys.exit({code})" if account is None else f"has {account.ending.value}"
            self._world.leave(rank, how)

    def _following_waits(self, rank: int) -> AbstractContextManager[object]:
        waits = self._world.waits.get(rank)
        if waits is None:
            return nullcontext()
        return waits.around(SanitizeKind.RACES in self._world.kinds)

    # -- in the thread that waits for them

    def join(
        self,
        timeout: float | None,
        expected: launch.Expected,
        caught_errors: Callable[[], Iterable[tuple[int, ExcInfo]]],
    ) -> RankEvidence:
        """Wait for all threads to end, or for the deadline. Return what is known about them.

        `caught_errors` gives the exceptions that bodies have caught and reported in another way.
        """
        try:
            timed_out = self._wait(timeout)
            for rank, error in caught_errors():
                self._add_error(rank, error)
            reports = tuple(self._report(rank) for rank in range(len(self.threads)))
            return RankEvidence(reports, timed_out, expected, self.finding, self.note)
        finally:
            self.end()

    def _add_error(self, rank: int, error: ExcInfo) -> None:
        writer = self._accounts[rank]
        if rank in self.errors or rank not in self._exits:
            return
        self.errors[rank] = error
        code = self._account_for(writer, error[1])
        self._exits[rank] = _exit_of(writer, code)

    def _wait(self, timeout: float | None) -> bool:
        """Wait until all threads have ended or some cannot end. Returns whether the time is over."""
        rules = WatchRules(GRACE_AFTER_FAILURE, GRACE_AFTER_FAILURE, takes_stacks=False, ends_ranks=False)
        watch = RankWatch(range(len(self.threads)), rules, began=self.began, timeout=timeout)
        with self._world.changed:
            while True:
                self._take_ends(watch)
                if watch.running:
                    self.finding = self._deadlock()
                if self.finding is not None:
                    watch.on_finding()
                step = watch.step(now())
                if step.action is not WatchAction.WAIT:
                    return watch.timed_out
                self._world.changed.wait(None if step.until is None else step.until - now())

    def _take_ends(self, watch: RankWatch) -> None:
        """Report the threads to the watch that have ended since the last call."""
        for rank in self._world.ended.keys() & watch.running:
            account = self._accounts[rank].account
            ending = RankEnding.EXITED if account is None else account.ending
            watch.on_end(RankReport(rank, ending), self._exits[rank].at)

    def _deadlock(self) -> Finding | None:
        """Find that all ranks that run wait for each other. A wait for a rank that has ended ends by itself."""
        ended = self._world.ended.keys()
        waiting = self._world.waiting
        all_wait = len(waiting) + len(ended) >= len(self.threads)
        if not all_wait or any(is_over() for is_over in waiting.values()):
            return None
        records = [self._world.record_of(rank) for rank in range(len(self.threads))]
        calls_of_waiting = {rank: calls for rank, calls in waiting_calls(records).items() if rank not in ended}
        deadlock = deadlocked(calls_of_waiting, {})
        return describe_deadlock(deadlock, {}) if deadlock else None

    def _report(self, rank: int) -> RankReport:
        recorder = self._world.record_of(rank)
        if rank in self._exits:
            findings = tuple(finding_of_rank(rank, note) for note in self._world.notes.get(rank, ()))
            account = self._accounts[rank].account
            report = launch.assemble_report(rank, account, self._exits[rank], self.began, stopped=None)
            return replace(report, recorder=recorder, found=findings)
        stacks = _stack_of(self.threads[rank])
        return RankReport(rank, RankEnding.STOPPED, now() - self.began, now(), stacks=stacks, recorder=recorder)

    def end(self) -> None:
        """Restore c10d's world, and stop all threads that can be stopped."""
        if self.is_over:
            return
        self.is_over = True
        self._world.close()
        if self._world.waits:
            from torch_testing_ext._collectives.sanitizer import thread_waits

            thread_waits.watch_waits([])
        if not self._all_gone():
            for thread in self.threads:
                if thread.is_alive():
                    _stop(thread)
            self._all_gone()
        _uninstall_threaded_pg()
        self._sharding_lock.__exit__(None, None, None)

    def _all_gone(self) -> bool:
        until = now() + END_TIMEOUT
        for thread in self.threads:
            was_started = thread.ident is not None
            if was_started:
                thread.join(max(0.0, until - now()))
        return not any(thread.is_alive() for thread in self.threads)


def _exit_of(writer: launch.AccountWriter, code: int) -> launch.Exit:
    """The end of a thread as that of a process with the exit code of its account, or `code` if it has none."""
    exit_code = code & 0xFF if writer.account is None else writer.account.code
    return launch.Exit(exit_code << 8, now())


def _stop(thread: threading.Thread) -> None:
    """Raise Stopped in a thread when it next runs Python code; a wait in C goes on."""
    ident = ctypes.c_ulong(thread.ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(Stopped))


@contextmanager
def process_group(rank: int, world_size: int, store: Any) -> Iterator[None]:
    """In the thread of a rank: create the default process group, and destroy it."""
    dist.init_process_group(backend="threaded", rank=rank, world_size=world_size, store=store)
    try:
        yield
    finally:
        # A thread that outlives its test must not destroy the group of a later one.
        ranks = getattr(threading.current_thread(), "ranks", None)
        has_outlived = ranks is not None and ranks.is_over
        if dist.is_initialized() and not has_outlived:
            dist.destroy_process_group()


def _stack_of(thread: threading.Thread) -> str:
    """Format the stack of a thread, down to the body that RankThreads calls, as faulthandler does."""
    lines = [f"Thread of {thread.name} (most recent call first):"]
    innermost = sys._current_frames().get(thread.ident or 0)
    for frame, line in traceback.walk_stack(innermost):
        code = frame.f_code
        if code.co_filename == __file__:
            break
        lines.append(f'  File "{code.co_filename}", line {line} in {code.co_name}')
    return hang.without_harness("\n".join(lines))
