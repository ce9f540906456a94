"""Checks that this process is safe to fork.

Locks that the other threads held stay locked in the child. There are two checks. The one before the fork ends the
threads that can be ended and reports the others that Python knows of. The one after the fork counts native threads:
numpy's OpenBLAS stops its threads in a fork handler, so a thread that is still there after a fork existed during
it.
"""

import ctypes
import faulthandler
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from types import CodeType, FrameType

from . import system
from .ends import wait_for_exit

_OMP_PAUSE_HARD = 2
# pytest's plugins whose threads a forked child does without: a thread that waits holds no lock but its own.
_PLUGINS_WITH_THREADS = ("pytest_rerunfailures", "pytest_timeout")
# pytest-xdist's workers read what their controller sends in a thread of execnet's, which `threading` does not know.
_READER_OF_A_WORKER = os.path.join("execnet", "gateway_base.py")
# The thread of NVIDIA's driver that waits for events, from the first use of NVML on (580): a child starts its own.
_OF_THE_DRIVER = re.compile("cuda[0-9a-f]{11}")
# Seconds for a thread that has been joined to leave the process; there is no event for that.
_ENDING = 1.0


class ForkHistory:
    """The origin of this process, as far as its threads depend on that."""

    def __init__(self) -> None:
        # The process that is known not to lack any thread.
        self._safe_pid = os.getpid()
        self._torch_has_threads = False

    def was_forked(self) -> str | None:
        """Return the reason why a process that was itself forked is not safe to fork; None if it was not forked.

        It may lack threads that its libraries count on: OpenMP would wait for them.
        """
        is_safe = os.getpid() == self._safe_pid
        return None if is_safe else "it was itself forked and lacks the threads of its parent"

    def mark_fork_safe(self) -> None:
        """Mark this process, a forked child, as safe to fork: its parent was checked, so it lacks no thread."""
        self._safe_pid = os.getpid()
        # torch replaces its pool of threads at the next use, and aborts if that is in several threads (2.11 to 2.15).
        torch = sys.modules.get("torch")
        # A module that is still being imported may have no such function yet.
        get_num_threads = getattr(torch, "get_num_threads", None)
        has_one = get_num_threads is not None and get_num_threads() == 1
        if self._torch_has_threads or has_one:
            self.have_torch_start_its_threads()

    def have_torch_start_its_threads(self) -> None:
        self._torch_has_threads = True
        torch = sys.modules.get("torch")
        with suppress(Exception):
            if torch is not None:
                torch.set_num_threads(torch.get_num_threads())


of_process = ForkHistory()


def prepare_to_fork() -> str | None:
    """Make this process safe to fork if possible. Returns the reason if it is not, or None."""
    if not system.CAN_FORK:
        return "this platform cannot fork safely"
    if threading.current_thread() is not threading.main_thread():
        # The parent-death signal is sent when the thread that forked the child ends, not the whole process.
        return "ranks are being started from a thread that is not the main one"
    others = other_threads()
    if others:
        return f"it runs other threads ({', '.join(others[:3])})"
    if system.threads() > 1:
        release_openmp()
        # pytest's `faulthandler_timeout` has a thread of its own for each test. Ranks have a time limit.
        faulthandler.cancel_dump_traceback_later()
    return None


def other_threads() -> list[str]:
    """The names of Python's threads that a forked child would miss."""
    main = threading.main_thread()
    others = [thread for thread in threading.enumerate() if thread is not main]
    return [thread.name for thread in others if not _is_of_plugin(thread)]


def _is_of_plugin(thread: threading.Thread) -> bool:
    function = getattr(thread, "function", None) or getattr(thread, "_target", None)
    return getattr(function, "__module__", "") in _PLUGINS_WITH_THREADS


def _readers_of_a_worker() -> int:
    """Count the threads in which workers of pytest-xdist read."""
    known = {thread.ident for thread in threading.enumerate()}
    readers = 0
    for ident, frame in sys._current_frames().items():
        if ident not in known:
            readers += _outermost(frame).co_filename.endswith(_READER_OF_A_WORKER)
    return readers


def _outermost(frame: FrameType) -> CodeType:
    while frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code


def check_by_fork() -> str | None:
    """Make this process safe to fork if possible, and check that by a fork, in which libraries end their threads."""
    unsafe = prepare_to_fork()
    if unsafe is None and system.threads() > 1:
        _threads_of_a_child(lambda: None)
    return unsafe or check_after_fork()


def check_after_fork() -> str | None:
    """Check, right after a fork, whether this process was safe to fork. Returns the reason if it was not, or None.

    A second child serves as a probe. Threads that the child has, or gets back when it asks for them, are not missed:
    torch's pthreadpool notices a fork and starts its threads again. This process asks, too: or they would stand for
    others. Nor are threads missed that end: one that has been joined stays in the process for a moment.
    """
    if _threads_that_count() <= 1:
        return None
    of_process.have_torch_start_its_threads()
    of_child = _threads_of_a_child(of_process.have_torch_start_its_threads)
    until = time.monotonic() + _ENDING
    missing = _threads_that_count() - of_child
    while missing > 0 and time.monotonic() < until:
        time.sleep(0.001)
        missing = _threads_that_count() - of_child
    if missing <= 0:
        return None
    names = ", ".join(system.names_of_native_threads()[:3])
    in_brackets = f" ({names})" if names else ""
    return f"it runs {missing} native threads that a forked child would miss{in_brackets}"


def _threads_that_count() -> int:
    """Count the threads of this process, but for those that a child does not miss."""
    of_driver = sum(bool(_OF_THE_DRIVER.fullmatch(name)) for name in system.names_of_native_threads())
    of_plugins = sum(_is_of_plugin(thread) for thread in threading.enumerate())
    return system.threads() - of_driver - of_plugins - _readers_of_a_worker()


def _threads_of_a_child(first: Callable[[], None]) -> int:
    pid = fork()
    if pid == 0:
        first()
        os._exit(min(system.threads(), 255))
    # None where SIGCHLD is ignored: there are no exit statuses then.
    return wait_for_exit(pid) or 0


def fork() -> int:
    """os.fork() without Python 3.12's warning about threads.

    Python counts threads before the fork handlers run; check_after_fork() counts them afterwards.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def release_openmp() -> None:
    """End OpenMP's idle worker threads, which a forked child would wait for. OpenMP restarts them when needed."""
    for name in ("libgomp", "libomp", "libiomp5"):
        path = system.loaded_library(name)
        if path is None:
            continue
        pause = getattr(ctypes.CDLL(path), "omp_pause_resource_all", None)
        if pause is not None:
            pause(_OMP_PAUSE_HARD)
