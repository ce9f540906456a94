"""Waiting for children and ending them: wait statuses, and processes that no other process waits for."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Container, Iterator
from contextlib import suppress

from . import system
from .loop import wait_readable
from .signals import signal_group


def reap() -> Iterator[tuple[int, int]]:
    """Each child that has ended, with its wait status."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended


def wait_for_exit(pid: int) -> int | None:
    """Wait for a child. Returns its exit code, negative for a signal; None if its status has been taken already."""
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return None


def has_ended(pid: int, timeout: float) -> bool:
    """Wait at most `timeout` seconds for a process to end, without reaping it."""
    gone = os.pidfd_open(pid)
    try:
        return wait_readable(gone, time.monotonic() + timeout)
    finally:
        os.close(gone)


def wait_until_gone(pids: list[int], timeout: float = 1.0) -> None:
    """Wait at most `timeout` seconds until processes that were killed have ended, and reap those that are children."""
    deadline = time.monotonic() + timeout
    for pid in pids:
        with suppress(OSError, AttributeError):  # it is gone already, or this system has no pidfd_open
            has_ended(pid, deadline - time.monotonic())
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def end_children(kept: Container[int] = ()) -> list[str]:
    """Kill all children of this process except `kept`, and the orphans it then adopts. Returns their descriptions."""
    descriptions = []
    while others := [pid for pid in system.children(os.getpid()) if pid not in kept]:
        for pid in others:
            descriptions.append(system.describe(pid))
            signal_group(pid, signal.SIGKILL)
        for pid in others:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
    return descriptions
