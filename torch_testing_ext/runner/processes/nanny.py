"""The nanny: the process that watches a unit and owns everything that the unit starts.

The nanny of a file watches one unit after another. It adopts the processes that a unit's processes leave behind, in
whatever group or session they are. It reports the end of the worker only when no process of the unit is left, so that
its devices are free by then. If its client is gone, it ends everything at once. If the nanny itself is killed, the
kernel ends the worker, and the nanny's parent ends the rest.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from torch_testing_ext._machine.memory import memory_of
from torch_testing_ext._process import child, grace, reaping, system
from torch_testing_ext._process.channel import Channel
from torch_testing_ext._process.loop import ParentLoop
from torch_testing_ext._process.messages import unexpected
from torch_testing_ext._process.signals import signal_group

from .worker_messages import (
    EndWorker,
    KillWorker,
    MeasureMemory,
    MemoryMeasured,
    Nothing,
    StacksTaken,
    StartUnit,
    TakeStacks,
    ToNanny,
    UnitOver,
    UnitSpec,
    WorkerBroke,
    WorkerEnded,
)

# If a worker was killed, its ranks are not ended by it but by the fork server.
GRACE_FOR_ORPHANS = 1.0
# A helper process that exits right after its test is not a leak.
GRACE_FOR_HELPERS = 0.1
# Stacks are complete when their files have not grown for this long: no process reports that it has written them.
_QUIET = 0.05

# Runs the worker of a unit with its channel; the last argument is the descriptor of its log.
Start = Callable[[UnitSpec, Channel[Nothing], int], NoReturn]


def run_and_exit(request: StartUnit, start: Start, more: Channel[StartUnit] | None = None) -> NoReturn:
    """Watch a unit, then those that `more` asks for, and exit."""
    loop = ParentLoop()
    next_unit: StartUnit | None = request
    while next_unit is not None and Nanny(next_unit, start, loop, more).watch():
        next_unit = _wait_for_request(loop, more) if more is not None else None
    os._exit(0)


def _wait_for_request(loop: ParentLoop, requests: Channel[StartUnit]) -> StartUnit | None:
    """The next unit; None when there will be none."""
    received: list[StartUnit] = []

    def receive() -> None:
        try:
            received.extend(requests.receive())
        except EOFError:
            loop.stop()
        if received:  # not yet if only a part of the request is here: that of a large unit comes in several
            loop.stop()

    loop.listen(requests, receive)
    loop.run()
    loop.forget(requests)
    return received[0] if received else None


class Nanny:
    """Starts a unit's worker, watches it, and ends the processes that it leaves."""

    def __init__(self, request: StartUnit, start: Start, loop: ParentLoop, parent: Channel[StartUnit] | None):
        # The locks of its devices are held as long as a process has their descriptors: until nothing of it is left.
        nanny_fd, worker_fd, *self._locks = request.fds
        self._number = request.number
        self._unit = request.unit
        self._channel: Channel[ToNanny] = Channel.on(nanny_fd, ToNanny)
        self._worker_channel: Channel[Nothing] = Channel.on(worker_fd, Nothing)
        self._start = start
        self._parent = parent
        self._worker = 0
        self._status: int | None = None
        self._at = 0.0
        self._loop = loop

    def watch(self) -> bool:
        """Start the worker, wait until it has ended, and report that. Returns False if nobody waits for the unit."""
        self._worker = child.fork_child(self._be_worker)
        self._worker_channel.close()
        self._loop.on_children_ended = self._reap
        self._loop.listen(self._channel, self._receive)
        self._loop.run()
        self._loop.forget(self._channel)
        if self._status is None:  # the process that this one serves is gone
            signal_group(self._worker, signal.SIGKILL)
            reaping.end_children()
            return False
        leftovers = self._end_leftovers()
        self._release_devices()
        # Before the parent reports that the unit is over: a unit of which the client has not heard this was lost.
        self._channel.send(WorkerEnded(self._status, self._at, leftovers))
        self._channel.close()
        if self._parent is not None:
            self._parent.send(UnitOver(self._number))
        return True

    def _be_worker(self) -> None:
        self._loop.abandon()
        self._channel.close()
        if self._parent is not None:
            self._parent.close()
        self._release_devices()
        try:
            log = os.open(self._unit.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            self._worker_channel.send(WorkerBroke(f"the log of its process cannot be created: {error}"))
            os._exit(1)
        self._start(self._unit, self._worker_channel, log)

    def _release_devices(self) -> None:
        for fd in self._locks:
            os.close(fd)
        self._locks = []

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
            self._on_message(message)

    def _on_message(self, message: ToNanny) -> None:
        match message:
            case TakeStacks():
                self._take_stacks()
            case EndWorker():
                self._end()
            case KillWorker():
                signal_group(self._worker, signal.SIGKILL)
            case MeasureMemory():
                self._channel.send(MemoryMeasured(memory_of(system.descendants(os.getpid()))))
            case _:
                unexpected(message)

    def _end(self) -> None:
        """Escalate: SIGTERM, then SIGKILL."""
        if self._status is not None:
            return
        signal_group(self._worker, signal.SIGCONT)  # a stopped process does not handle SIGTERM
        reaping.escalate(
            lambda seconds: reaping.has_ended(self._worker, seconds),
            lambda number: signal_group(self._worker, number),
            after_sigterm=grace.AFTER_SIGTERM,
        )

    def _end_leftovers(self) -> tuple[str, ...]:
        """End the processes that are still running. Returns descriptions of those that should have ended themselves."""
        if not system.children(os.getpid()):
            return ()
        exited = self._status is not None and os.WIFEXITED(self._status)
        timeout = GRACE_FOR_HELPERS if exited else GRACE_FOR_ORPHANS
        reaping.wait_until_gone(system.children(os.getpid()), timeout)
        left = system.children(os.getpid())
        descriptions = tuple(describe(pid) for pid in left)
        for pid in left:
            signal_group(pid, signal.SIGTERM)
        reaping.wait_until_gone(left, grace.AFTER_SIGTERM)
        reaping.end_children()
        return descriptions

    def _take_stacks(self) -> None:
        """Have every process that can write its stacks do so. Answers when all have, or after the time-out."""
        asked = [pid for pid in (self._worker, *system.descendants(self._worker)) if _handles(pid, system.DUMP_STACKS)]
        for pid in asked:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, system.DUMP_STACKS)
        self._let_them_write()
        self._channel.send(StacksTaken())

    def _let_them_write(self) -> None:
        deadline, sizes = time.monotonic() + grace.FOR_STACKS, None
        while sizes != (sizes := self._sizes_of_stacks()) and time.monotonic() < deadline:
            time.sleep(_QUIET)

    def _sizes_of_stacks(self) -> list[int]:
        files = [self._unit.stacks, *sorted(self._unit.ranks.glob("*/*.stacks"))]
        return [file.stat().st_size for file in files if file.exists()]


def describe(pid: int) -> str:
    """A process by pid and command line. One that was forked without exec has this process's command line."""
    description, ours = system.describe(pid), system.describe(os.getpid())
    alike = description.partition(": ")[2] == ours.partition(": ")[2]
    return f"pid {pid}: a fork of the test's process" if alike else description


def _handles(pid: int, number: int) -> bool:
    """Does the process have a handler for this signal? Without one the signal would kill it."""
    try:
        with open(f"/proc/{pid}/status") as status:
            caught = next(line for line in status if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return False
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
