"""Ranks that are threads of this process: started and joined together, and judged like processes.

A thread cannot be killed. One that does not end is asked to stop, as far as Python can do that, and then left behind as
a daemon; its later changes to process groups happen in a world that no other thread sees.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist

from torch_testing_ext import _torch, launch
from torch_testing_ext._collectives.findings import Finding, deadlocked, describe_deadlock, finding_of_rank, waits
from torch_testing_ext._process import grace
from torch_testing_ext._sanitizer.kinds import SanitizeKind
from torch_testing_ext.launch import RankEnding, RankReport, hang, now
from torch_testing_ext.launch.job import Sanitize

from .group import ThreadLocalWorld, _install_threaded_pg, _uninstall_threaded_pg, site_of_call

# The other ranks may run on after a failure. Those that wait for the failed rank in a collective end at once;
# a rank that computes cannot be ended, so it gets the chance to finish.
GRACE_AFTER_FAILURE = grace.AFTER_FAILURE_FOR_GOOD
# How long a thread may take to end after its account, or after it is asked to stop.
END_TIMEOUT = 0.5


_HashStore: Any = dist.HashStore  # type: ignore[attr-defined, unused-ignore]  # from C++


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
        self._sharding_lock = _torch.threads.one_sharding_at_a_time()
        self._sharding_lock.__enter__()
        self._world: ThreadLocalWorld = _install_threaded_pg()
        self.note = ""  # what must be known to run a test again
        if sanitize:
            self._sanitize(sanitize, world_size)
        self.store = _HashStore()
        self.errors: dict[int, ExcInfo] = {}  # by rank
        self.test: Any = None  # whose threads these are
        self.finding: Finding | None = None  # why their waiting was given up before the time-out
        self._accounts = [launch.AccountWriter(None) for _ in range(world_size)]
        self._exits: dict[int, launch.Exit] = {}
        self.is_over = False
        self.threads = [
            threading.Thread(target=self._run_rank, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(world_size)
        ]
        for thread in self.threads:
            thread.ranks = self  # type: ignore[attr-defined] # for those who have the thread alone

    def _sanitize(self, sanitize: Sanitize, world_size: int) -> None:
        self._world.kinds, self.note = sanitize.kinds, sanitize.note
        if sanitize.kinds & {SanitizeKind.WAITS, SanitizeKind.RACES}:
            self._follow_works(world_size)
        if sanitize.shake is not None:
            from torch_testing_ext._sanitizer import checks  # only where it is asked for

            self._world.delays = {rank: checks.Delays(sanitize.shake, rank) for rank in range(world_size)}

    def _follow_works(self, world_size: int) -> None:
        from . import waits  # only where it is asked for

        ranks = range(world_size)
        world = self._world
        world.waits = {rank: waits.ThreadWaits(partial(world.note, rank), site_of_call) for rank in ranks}
        waits.watch_waits(list(world.waits.values()))

    def start(self) -> None:
        try:
            for thread in self.threads:
                thread.start()
        except BaseException:
            self.end()
            raise

    # -- in the threads

    def _run_rank(self, rank: int) -> None:
        writer, code = self._accounts[rank], 0
        try:
            waits = self._world.waits.get(rank)
            with nullcontext() if waits is None else waits.around(SanitizeKind.RACES in self._world.kinds):
                self._body(rank)
            writer.passed()
        except BaseException as error:
            self.errors[rank] = (type(error), error, error.__traceback__)
            code = self._account_for(writer, error)
        finally:
            account = writer.account
            self._exits[rank] = launch.Exit((account.code if account else code & 0xFF) << 8, now())
            self._world.leave(rank, f"has {account.ending.value}" if account else f"left by sys.exit({code})")

    # -- in the thread that waits for them

    def join(
        self, timeout: float | None, told: Callable[[], Iterator[tuple[int, ExcInfo]]] = lambda: iter(())
    ) -> tuple[list[RankReport], bool]:
        """Wait for all threads to end, or for the deadline. Return a report for each, and whether they timed out.

        `told` gives the exceptions that bodies have caught and reported in another way.
        """
        try:
            timed_out = self._wait(timeout)
            for rank, error in told():
                self._add_error(rank, error)
            return [self._report(rank) for rank in range(len(self.threads))], timed_out
        finally:
            self.end()

    def _add_error(self, rank: int, error: ExcInfo) -> None:
        writer = self._accounts[rank]
        if rank in self.errors or rank not in self._exits:
            return
        self.errors[rank] = error
        code = self._account_for(writer, error[1])
        self._exits[rank] = launch.Exit((writer.account.code if writer.account else code & 0xFF) << 8, now())

    def _wait(self, timeout: float | None) -> bool:
        deadline = None if timeout is None else self.began + timeout
        with self._world.changed:
            while len(self._world.ended) < len(self.threads):
                self.finding = self._deadlock()
                if self.finding is not None:
                    return False
                until = min((end for end in (deadline, self._grace_ends()) if end is not None), default=None)
                if until is not None and until <= now():
                    return until == deadline
                self._world.changed.wait(None if until is None else until - now())
        return False

    def _deadlock(self) -> Finding | None:
        """Whether all ranks that run wait for each other. A wait for a rank that has ended ends by itself."""
        ended = dict(self._world.ended)
        waiting = self._world.waiting
        if len(waiting) + len(ended) < len(self.threads) or any(done() for done in waiting.values()):
            return None
        ranks = range(len(self.threads))
        records = [*map(self._world.record_of, ranks)]
        found = deadlocked({rank: calls for rank, calls in waits(records).items() if rank not in ended}, {})
        return describe_deadlock(found, {}) if found else None

    def _grace_ends(self) -> float | None:
        accounts = {rank: self._accounts[rank].account for rank in self._exits}
        failed = [rank for rank, account in accounts.items() if account is None or account.ending.is_failure]
        return min(self._exits[rank].at for rank in failed) + GRACE_AFTER_FAILURE if failed else None

    def _report(self, rank: int) -> RankReport:
        recorder = self._world.record_of(rank)
        found = tuple(finding_of_rank(rank, note) for note in self._world.notes.get(rank, ()))
        if rank in self._exits:
            account, ended = self._accounts[rank].account, self._exits[rank]
            report = launch.assemble_report(rank, account, ended, self.began, stopped=None)
            return replace(report, recorder=recorder, found=found)
        stacks = _stack_of(self.threads[rank])
        return RankReport(rank, RankEnding.STOPPED, now() - self.began, now(), stacks=stacks, recorder=recorder)

    def end(self) -> None:
        """Restore c10d's world, and stop all threads that can be stopped."""
        if self.is_over:
            return
        self.is_over = True
        self._world.close()
        if self._world.waits:
            from . import waits

            waits.watch_waits([])
        if not self._all_gone():
            for thread in filter(threading.Thread.is_alive, self.threads):
                # Raises Stopped when the thread next runs Python code; a wait in C goes on.
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Stopped))
            self._all_gone()
        _uninstall_threaded_pg()
        self._sharding_lock.__exit__(None, None, None)

    def _all_gone(self) -> bool:
        until = now() + END_TIMEOUT
        for thread in self.threads:
            if thread.ident is not None:  # it was started
                thread.join(max(0.0, until - now()))
        return not any(thread.is_alive() for thread in self.threads)


@contextmanager
def process_group(rank: int, world_size: int, store: Any) -> Iterator[None]:
    """In the thread of a rank: create the default process group, and destroy it."""
    dist.init_process_group(backend="threaded", rank=rank, world_size=world_size, store=store)
    try:
        yield
    finally:
        # A thread that outlives its test must not destroy the group of a later one.
        ranks = getattr(threading.current_thread(), "ranks", None)
        if dist.is_initialized() and not (ranks is not None and ranks.is_over):
            dist.destroy_process_group()


def _stack_of(thread: threading.Thread) -> str:
    """Format the stack of a thread, down to the body that RankThreads calls, as faulthandler does."""
    lines = [f"Thread of {thread.name} (most recent call first):"]
    for frame, line in traceback.walk_stack(sys._current_frames().get(thread.ident or 0)):
        if frame.f_code.co_filename == __file__:
            break
        lines.append(f'  File "{frame.f_code.co_filename}", line {line} in {frame.f_code.co_name}')
    return hang.tidy("\n".join(lines))
