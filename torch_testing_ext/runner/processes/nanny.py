"""The process that sees one unit to its end: it owns everything that the unit starts.

The nanny adopts the processes that the unit's processes leave behind, whatever group or session they moved to. It
reports how the worker ended once nothing is left of the unit, so that its devices are free by then. If the process that
it serves is gone, it ends everything at once; if it is killed itself, the kernel ends the worker, and its parent the
rest.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn, assert_never

from torch_testing_ext._process import child, reaping, system
from torch_testing_ext._process.channel import Channel
from torch_testing_ext._process.parent_loop import ParentLoop
from torch_testing_ext._process.signals import signal_group

from .protocol import EndWorker, KillWorker, Nothing, StacksTaken, TakeStacks, ToNanny, WorkerEnded
from .unit_spec import UnitSpec

# How long the worker, then its leftovers, may take to obey SIGTERM.
GRACE_AFTER_SIGTERM = 0.2
# A worker that was killed does not end its ranks: the process that starts them does.
GRACE_FOR_ORPHANS = 1.0
# A helper that is about to end when its test has ended is no leak.
GRACE_FOR_HELPERS = 0.1
PATIENCE_FOR_STACKS = 1.0
# Stacks are complete when their files have not grown for so long: nothing says when a process has written them.
_QUIET = 0.05

Start = Callable[[int], NoReturn]  # the life of the worker; it is given its log


def live(unit: UnitSpec, channel: Channel[ToNanny], worker_channel: Channel[Nothing], start: Start) -> NoReturn:
    """The whole life of the process."""
    Nanny(unit, channel, worker_channel, start).watch()
    os._exit(0)


class Nanny:
    """Starts a unit's worker, watches it, and ends what it leaves."""

    def __init__(self, unit: UnitSpec, channel: Channel[ToNanny], worker_channel: Channel[Nothing], start: Start):
        self._unit = unit
        self._channel = channel
        self._worker_channel = worker_channel
        self._start = start
        self._worker = 0
        self._status: int | None = None
        self._at = 0.0
        self._loop = ParentLoop(self._reap)

    def watch(self) -> None:
        """See the worker to its end, and report it."""
        self._worker = child.fork_child(self._be_worker)
        self._worker_channel.close()
        self._loop.listen(self._channel, self._receive)
        self._loop.run()
        if self._status is None:  # the process that this one serves is gone
            signal_group(self._worker, signal.SIGKILL)
            reaping.end_children()
            return
        leftovers = self._end_leftovers()
        self._channel.send(WorkerEnded(self._status, self._at, leftovers))

    def _be_worker(self) -> None:
        self._loop.abandon()
        self._channel.close()
        self._start(os.open(self._unit.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))

    def _reap(self) -> None:
        for pid, status in reaping.reap():
            if pid == self._worker:
                self._status, self._at = status, time.monotonic()
                self._loop.stop()

    def _receive(self) -> None:
        try:
            messages = self._channel.receive()
        except EOFError:
            self._loop.stop()
            return
        for message in messages:
            self._obey(message)

    def _obey(self, message: ToNanny) -> None:
        match message:
            case TakeStacks():
                self._take_stacks()
            case EndWorker():
                self._end()
            case KillWorker():
                signal_group(self._worker, signal.SIGKILL)
            case _:
                assert_never(message)

    def _end(self) -> None:
        """Escalate: SIGTERM, then SIGKILL."""
        if self._status is not None:
            return
        signal_group(self._worker, signal.SIGCONT)  # a stopped process obeys nothing
        signal_group(self._worker, signal.SIGTERM)
        if not reaping.has_ended(self._worker, GRACE_AFTER_SIGTERM):
            signal_group(self._worker, signal.SIGKILL)

    def _end_leftovers(self) -> tuple[str, ...]:
        """End what still runs. Returns the descriptions of processes that should have ended by themselves."""
        if not system.children(os.getpid()):
            return ()
        exited = self._status is not None and os.WIFEXITED(self._status)
        patience = GRACE_FOR_HELPERS if exited else GRACE_FOR_ORPHANS
        reaping.wait_until_gone(system.children(os.getpid()), patience)
        left = system.children(os.getpid())
        descriptions = tuple(describe(pid) for pid in left)
        for pid in left:
            signal_group(pid, signal.SIGTERM)
        reaping.wait_until_gone(left, GRACE_AFTER_SIGTERM)
        reaping.end_children()
        return descriptions

    def _take_stacks(self) -> None:
        """Have every process that can write where it is do so; answers when all have, or when time is up."""
        asked = [pid for pid in (self._worker, *descendants(self._worker)) if _handles(pid, system.DUMP_STACKS)]
        for pid in asked:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, system.DUMP_STACKS)
        self._let_them_write()
        self._channel.send(StacksTaken(len(asked)))

    def _let_them_write(self) -> None:
        deadline, sizes = time.monotonic() + PATIENCE_FOR_STACKS, None
        while sizes != (sizes := self._sizes_of_stacks()) and time.monotonic() < deadline:
            time.sleep(_QUIET)

    def _sizes_of_stacks(self) -> list[int]:
        files = [self._unit.stacks, *sorted(self._unit.ranks.glob("*/*.stacks"))]
        return [file.stat().st_size for file in files if file.exists()]


def descendants(pid: int) -> list[int]:
    below = system.children(pid)
    return below + [deeper for child in below for deeper in descendants(child)]


def describe(pid: int) -> str:
    """A process as a person would name it; one that was only forked has our own command line."""
    named, ours = system.describe(pid), system.describe(os.getpid())
    alike = named.partition(": ")[2] == ours.partition(": ")[2]
    return f"pid {pid}: a fork of the test's process" if alike else named


def _handles(pid: int, number: int) -> bool:
    """Has the process a handler for this signal? To one that has none it would be deadly."""
    try:
        with open(f"/proc/{pid}/status") as status:
            caught = next(line for line in status if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return False
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
