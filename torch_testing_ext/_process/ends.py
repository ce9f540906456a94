"""The ends of child processes."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from typing import Any

from . import system
from .event_loop import wait_readable
from .signals import signal_group, signal_name

# A helper process that exits right after its test is not a leak.
FOR_HELPERS = 0.1
# Seconds from SIGTERM to SIGKILL.
AFTER_SIGTERM = 0.2
SIGTERM_DID_NOT_END_IT = f"SIGTERM did not end it in {AFTER_SIGTERM} s, SIGKILL did"


def reap() -> Iterator[tuple[int, int]]:
    """Each child that has ended, with its wait status."""
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            yield pid, status


def wait_for_exit(pid: int) -> int | None:
    """Wait for a child. Returns its exit code, negative for a signal; None if its status has been taken already."""
    try:
        _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status)
    except ChildProcessError:
        return None


def has_ended(pid: int, timeout: float) -> bool:
    """Wait at most `timeout` seconds for a process to end, without reaping it."""
    if sys.platform == "darwin":
        with suppress(ProcessLookupError), select.kqueue() as queue:
            event = select.kevent(pid, select.KQ_FILTER_PROC, select.KQ_EV_ADD, select.KQ_NOTE_EXIT)
            return bool(queue.control([event], 1, max(0.0, timeout)))
        return True
    gone = os.pidfd_open(pid)
    try:
        return wait_readable(gone, time.monotonic() + timeout)
    finally:
        os.close(gone)


def wait_until_gone(pids: list[int], timeout: float = 1.0) -> None:
    """Wait at most `timeout` seconds until processes that were killed have ended, and reap those that are children."""
    deadline = time.monotonic() + timeout
    for pid in pids:
        # The process may be gone already.
        with suppress(OSError):
            has_ended(pid, deadline - time.monotonic())
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def escalate(
    have_ended: Callable[[float], bool], send: Callable[[int], object], *, by_itself: float = 0.0, after_sigterm: float
) -> None:
    """End processes: SIGTERM to those that do not end by themselves in so many seconds, and SIGKILL after some more.

    `have_ended` waits for them at most that long; `send` sends them a signal.
    """
    if have_ended(by_itself):
        return
    send(signal.SIGTERM)
    if not have_ended(after_sigterm):
        send(signal.SIGKILL)


def end(process: subprocess.Popen[Any], *, by_itself: float = 0.0, after_sigterm: float) -> int:
    """End a process in this way, and at once if the user interrupts that. Returns its exit code."""

    def has_ended(seconds: float) -> bool:
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        return process.returncode is not None

    try:
        escalate(has_ended, process.send_signal, by_itself=by_itself, after_sigterm=after_sigterm)
    except KeyboardInterrupt:
        process.kill()
        raise
    return process.wait()


def how_it_ended(process: subprocess.Popen[Any], timeout: float) -> str | None:
    """The end of a process, in words, to follow a subject; None if it has not ended in time."""
    try:
        return describe_exit(process.wait(timeout))
    except subprocess.TimeoutExpired:
        return None


def end_children(kept: Container[int] = ()) -> list[str]:
    """Kill all children of this process except `kept`, and the orphans it then adopts. Returns their descriptions."""
    descriptions = []
    while others := [pid for pid in system.children(os.getpid()) if pid not in kept]:
        for pid in others:
            if not system.is_ending(pid):
                descriptions.append(system.describe(pid))
            signal_group(pid, signal.SIGKILL)
        for pid in others:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
    return descriptions


def describe_exit(code: int | None, when: str = "", *, as_participle: bool = False) -> str:
    """Describe the end of a process as a predicate: `was killed by SIGKILL 0.3 s into test_x (out of memory?)`.

    `code` is negative for a signal, and None if the exit status is unknown. `when` begins with a space.
    `as_participle`: without `was`.
    """
    if code is None:
        return f"ended in an unknown way{when}"
    if code >= 0:
        return f"exited with code {code}{when}"
    hint = " (out of memory?)" if code == -signal.SIGKILL else ""
    verb = "killed" if as_participle else "was killed"
    return f"{verb} by {signal_name(-code)}{when}{hint}"
