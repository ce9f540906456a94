"""Signals: read as data by an event loop, held back around a fork, sent to whole process groups."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from . import system

# A child forked while these are blocked meets none of them before it has handlers of its own.
_HELD_BACK = {signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, system.DUMP_STACKS}


@contextmanager
def blocked() -> Iterator[None]:
    """Hold signals back around a fork; a child unblocks them when it is ready (`unblock`).

    With the handlers of its parent the child would write the number of a signal to the parent's wake-up descriptor,
    and the parent would take it for a signal of its own; or Ctrl-C would unwind a second time into the test runner.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unblock() -> None:
    """Receive all signals again."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


class SignalReader:
    """Signals as data: a descriptor becomes readable when one of `numbers` arrives, and `read` returns which.

    Nothing is interrupted in the middle. Must be made in the main thread.
    """

    def __init__(self, numbers: Iterable[int]):
        self._reading, self._writing = os.pipe()
        for fd in (self._reading, self._writing):
            os.set_blocking(fd, False)
        self._handlers: dict[int, Any] = {number: signal.signal(number, _noted) for number in numbers}
        self._wakeup = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)

    def fileno(self) -> int:
        return self._reading

    def read(self) -> list[int]:
        """The signals that have arrived since the last call, in their order."""
        arrived = b""
        with suppress(BlockingIOError):
            while data := os.read(self._reading, 4096):
                arrived += data
        return [number for number in arrived if number in self._handlers]

    def close(self) -> None:
        """Restore the handlers that were there before."""
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._close_descriptors()

    def abandon(self) -> None:
        """In a forked child, which has no use for the signals of its parent."""
        signal.set_wakeup_fd(-1)
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        os.close(self._reading)
        os.close(self._writing)


def _noted(number: int, frame: FrameType | None) -> None:
    """The number has been written to the wake-up descriptor."""


def signal_group(pid: int, number: int) -> None:
    """Signal a process and its group, once each; the process alone if it has not made its group yet."""
    with suppress(ProcessLookupError, PermissionError):
        try:
            os.killpg(pid, number)
        except ProcessLookupError:
            os.kill(pid, number)
