"""The process that sees one unit to its end: it owns everything that the unit starts.

What the unit's processes leave behind is adopted by the nanny, whatever group or session it moved to. The nanny tells
how the worker ended once nothing is left of the unit, so that its devices are free by then. If whoever it works for
is gone, it ends everything at once; if it is killed itself, the kernel ends the worker, and its parent the rest.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from typing import NoReturn

from torch_testing_ext._process import system
from torch_testing_ext._process.channel import Channel, Message
from torch_testing_ext.launch.fork_server import drain, held_back, see_to_their_end, signal_group, wakeups

from .fork_parent import end_others
from .unit_spec import UnitSpec

# How long the worker, then what it left, may take to obey SIGTERM.
GRACE_AFTER_SIGTERM = 0.2
# A worker that was killed has no hand in the end of its ranks: the process that starts them sees to it.
GRACE_FOR_ORPHANS = 1.0
# A helper that is about to end when its test has ended is no leak.
GRACE_FOR_HELPERS = 0.1
PATIENCE_FOR_STACKS = 1.0

Start = Callable[[int], NoReturn]  # the life of the worker; it is given its log


def live(order: UnitSpec, channel: Channel, worker_channel: Channel, start: Start) -> NoReturn:
    Nanny(order, channel, worker_channel, start).watch()
    os._exit(0)


class Nanny:
    def __init__(self, order: UnitSpec, channel: Channel, worker_channel: Channel, start: Start):
        self._order = order
        self._channel = channel
        self._worker_channel = worker_channel
        self._start = start
        self._worker = 0
        self._status: int | None = None
        self._at = 0.0
        self._wakeups = (-1, -1)

    def watch(self) -> None:
        with wakeups() as self._wakeups:
            self._worker = self._fork()
            self._worker_channel.close()
            while self._status is None and self._step():
                pass
            if self._status is None:
                signal_group(self._worker, signal.SIGKILL)
                end_others(())
                return
            leftovers = self._end_leftovers()
        self._channel.send({"ended": self._status, "at": self._at, "leftovers": leftovers})

    def _fork(self) -> int:
        parent = os.getpid()
        with held_back():
            pid = os.fork()
            if pid == 0:
                self._be_worker(parent)
        return pid

    def _be_worker(self, parent: int) -> NoReturn:
        try:
            os.setsid()
            system.die_with(parent, signal.SIGKILL)
            signal.set_wakeup_fd(-1)
            for fd in self._wakeups:
                os.close(fd)
            self._channel.close()
            log = os.open(self._order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self._start(log)
        finally:
            os._exit(1)

    def _step(self) -> bool:
        """False where nobody is left who wants to know."""
        ready = wait([self._channel, self._wakeups[0]])  # type: ignore[list-item]
        if self._wakeups[0] in ready:
            if signal.SIGTERM in drain(self._wakeups[0]):
                return False
            self._reap()
        if self._channel in ready:
            with suppress(EOFError):
                for order in self._channel.receive():
                    self._obey(order)
                return True
            return False
        return True

    def _obey(self, order: Message) -> None:
        match order["order"]:
            case "stacks":
                self._take_stacks()
            case "end":
                self._end()
            case "kill":
                signal_group(self._worker, signal.SIGKILL)

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while (died := os.waitpid(-1, os.WNOHANG))[0]:
                if died[0] == self._worker:
                    self._status, self._at = died[1], time.monotonic()

    def _end(self) -> None:
        """The ladder."""
        if self._status is not None:
            return
        signal_group(self._worker, signal.SIGCONT)  # a stopped process obeys nothing
        signal_group(self._worker, signal.SIGTERM)
        if not self._wait_for_worker(GRACE_AFTER_SIGTERM):
            signal_group(self._worker, signal.SIGKILL)

    def _wait_for_worker(self, seconds: float) -> bool:
        gone = os.pidfd_open(self._worker)
        try:
            return bool(wait([gone], seconds))
        finally:
            os.close(gone)

    def _end_leftovers(self) -> list[str]:
        """End what still runs. Returns who ought to have ended by itself."""
        if not system.children(os.getpid()):
            return []
        exited = self._status is not None and os.WIFEXITED(self._status)
        self._wait_for_children(GRACE_FOR_HELPERS if exited else GRACE_FOR_ORPHANS)
        left = system.children(os.getpid())
        names = [describe(pid) for pid in left]
        for pid in left:
            signal_group(pid, signal.SIGTERM)
        see_to_their_end(left, GRACE_AFTER_SIGTERM)
        end_others(())
        return names

    def _wait_for_children(self, seconds: float) -> None:
        see_to_their_end(system.children(os.getpid()), seconds)

    def _take_stacks(self) -> None:
        """Have everybody who can write where they are; answers `stacks` when they have, or at the end of patience."""
        asked = [pid for pid in (self._worker, *descendants(self._worker)) if _handles(pid, system.DUMP_STACKS)]
        for pid in asked:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, system.DUMP_STACKS)
        self._let_them_write()
        self._channel.send({"stacks": len(asked)})

    def _let_them_write(self) -> None:
        """Nobody tells that he is done: until the files have not grown for a while."""
        deadline, sizes = time.monotonic() + PATIENCE_FOR_STACKS, None
        while sizes != (sizes := self._sizes_of_stacks()) and time.monotonic() < deadline:
            wait([], 0.05)

    def _sizes_of_stacks(self) -> list[int]:
        files = [self._order.stacks, *sorted(self._order.ranks.glob("*/*.stacks"))]
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
