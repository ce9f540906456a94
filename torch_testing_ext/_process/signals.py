"""Signals as data, blocked around a fork, and sent to process groups."""

import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from . import system

# A child that is forked while these are blocked receives none of them before it has handlers of its own.
_BLOCKED = {signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, system.DUMP_STACKS, system.DUMP_STACKS_NOW}


@contextmanager
def blocked() -> Iterator[None]:
    """Block signals around a fork; a child unblocks them when it is ready (`unblock`).

    With its parent's handlers the child would write a signal's number to the parent's wake-up descriptor, and the
    parent would take it for a signal of its own; or Ctrl-C would unwind into the test runner in both processes.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def keep_exit_codes() -> None:
    """Have the exit codes of children kept: where SIGCHLD is ignored, subprocess takes every child for a success."""
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


class SignalReader:
    """Signals as data: a descriptor becomes readable when one of `numbers` arrives, and `read` returns which.

    No handler interrupts other code. Must be made in the main thread.
    """

    def __init__(self, numbers: Iterable[int]):
        self._reading, self._writing = os.pipe()
        for fd in (self._reading, self._writing):
            os.set_blocking(fd, False)
        self._handlers: dict[int, Any] = {}
        for number in numbers:
            self._handlers[number] = signal.signal(number, _do_nothing)
        self._wakeup = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)

    def fileno(self) -> int:
        return self._reading

    def read(self) -> list[int]:
        """The signals that have arrived since the last call, in order of arrival."""
        arrived = b""
        with suppress(BlockingIOError):
            while data := os.read(self._reading, 4096):
                arrived += data
        return [number for number in arrived if number in self._handlers]

    def close(self) -> None:
        """Restore the handlers that were set before."""
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._close_descriptors()

    def abandon(self) -> None:
        """Stop reading, in a forked child: the signals of its parent do not concern it."""
        signal.set_wakeup_fd(-1)
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        os.close(self._reading)
        os.close(self._writing)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """The handler: the number has been written to the wake-up descriptor before it is called."""


def signal_group(pid: int, number: int) -> None:
    """Signal a process group by its leader, or the process alone if it has not made its group yet."""
    with suppress(ProcessLookupError, PermissionError):
        try:
            os.killpg(pid, number)
        except ProcessLookupError:
            os.kill(pid, number)


def signal_name(number: int) -> str:
    """`SIGKILL`; `signal 70` for a signal without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
