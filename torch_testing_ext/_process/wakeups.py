"""Wakes threads that wait in the kernel, as often as they fall asleep again.

A timer of the kernel sends each thread a signal whose handler does nothing. A call such as epoll_wait then returns
early; most others are resumed by the kernel, and no data is lost. Python does not notice the signal.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from . import system

# By default this signal is ignored: one that comes late, after the handler is gone, has no effect.
_SIGNAL = signal.SIGURG
# A thread that is woken more often gets less done in between. Waiting for the next signal costs half of this.
_INTERVAL_NS = 100_000

_SIGEV_THREAD_ID = 4


class _SignalEvent(ctypes.Structure):
    """`struct sigevent` of Linux, for a signal to one thread."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("thread", ctypes.c_int),
        ("_rest", ctypes.c_char * 64),
    )


class _TimerSetting(ctypes.Structure):
    """`struct itimerspec`: the interval and the time until the first signal."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("interval_s", "interval_ns", "first_s", "first_ns"))


@functools.cache
def _functions() -> Any:
    """The functions of the C library, or None if it lacks one of them."""
    if not system.LINUX:
        return None
    library = ctypes.CDLL(None)
    try:
        library.timer_create, library.timer_settime, library.timer_delete  # noqa: B018 - raises if it is missing
        library.signal.restype = ctypes.c_void_p
        library.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
        return library
    except AttributeError:
        return None


# The windows that are open, in any thread, and the handler from before the first of them.
_open = 0
_handler_before: int | None = None
_lock = threading.RLock()


@contextmanager
def waking(threads: Iterable[int]) -> Iterator[None]:
    """Meanwhile, wake these threads of this process every tenth of a millisecond.

    Nothing happens if the process uses the signal itself. Threads that have ended, or block the signal, are left alone.
    """
    library = _functions()
    if library is None or not _install_handler(library):
        yield
        return
    timers = []
    try:
        timers += [timer for thread in threads if (timer := _start_timer(library, thread))]
        yield
    finally:
        for timer in timers:
            library.timer_delete(timer)
        _remove_handler(library)


def _install_handler(library: Any) -> bool:
    """Have the signal do nothing. False if the process has a handler of its own."""
    global _open, _handler_before
    # A function in C, as a handler of Python's would run Python code: any that does nothing will do.
    nothing = ctypes.cast(library.getppid, ctypes.c_void_p).value
    with _lock:
        if not _open:
            before = library.signal(_SIGNAL, nothing)
            if before not in (None, signal.SIG_DFL, signal.SIG_IGN):  # None is SIG_DFL, too: a null pointer
                library.signal(_SIGNAL, before)
                return False
            _handler_before = before
        _open += 1
    return True


def _remove_handler(library: Any) -> None:
    global _open
    with _lock:
        _open -= 1
        if not _open:
            library.signal(_SIGNAL, _handler_before)


def _start_timer(library: Any, thread: int) -> ctypes.c_void_p | None:
    event = _SignalEvent(signal=_SIGNAL, notify=_SIGEV_THREAD_ID, thread=thread)
    timer = ctypes.c_void_p()
    if library.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)):
        return None  # there is no such thread, or a sandbox forbids it
    setting = _TimerSetting(interval_ns=_INTERVAL_NS, first_ns=_INTERVAL_NS)
    library.timer_settime(timer, 0, ctypes.byref(setting), None)
    return timer


def thread_names(threads: Iterable[int]) -> dict[int, str]:
    """The names of those threads of this process that are still there."""
    names = {}
    for thread in threads:
        try:
            with open(f"/proc/self/task/{thread}/comm") as file:
                names[thread] = file.read().strip()
        except OSError:
            continue
    return names


def all_threads() -> set[int]:
    """The threads of this process, including native ones; none if the system does not show them."""
    try:
        return {int(name) for name in os.listdir("/proc/self/task")}
    except OSError:
        return set()
