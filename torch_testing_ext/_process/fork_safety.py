"""May this process be forked? A forked child has only the thread that forked, whatever the others were holding.

Looked at twice: before the fork for what can be mended or excludes it, after it for what the fork showed. numpy's
OpenBLAS stops its threads in a fork handler of its own, so they are gone right after one; threads that are still
there then were there during the fork.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import warnings
from contextlib import suppress

from . import system

_OMP_PAUSE_HARD = 2
_born_as = os.getpid()


def prepare_to_fork() -> str | None:
    """Make this process fit to be forked where that can be done. Returns why it cannot, or None."""
    if not system.CAN_FORK:
        return "this platform cannot fork safely"
    if threading.current_thread() is not threading.main_thread():
        # Whoever is to die with its parent dies with the thread that forked it.
        return "ranks are being started from a thread that is not the main one"
    others = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if others:
        return f"it runs other threads ({', '.join(others[:3])})"
    if system.threads() > 1:
        release_openmp()
    return None


def was_forked() -> str | None:
    """A process that somebody forked may lack threads that its libraries count on: OpenMP would wait for them."""
    return None if os.getpid() == _born_as else "it was itself forked, from a process whose threads it has not got"


def mark_fork_safe() -> None:
    """Called in a forked child whose parent was seen to be fit: it lacks nothing, so it may be forked in its turn."""
    global _born_as
    _born_as = os.getpid()


def check_after_fork() -> str | None:
    """Called right after a fork: was this process fit for it? Returns why not, or None.

    A second child is the test: what it has of the threads, or gets again when it asks for it, nobody misses. So it is
    with torch's pthreadpool, which notices a fork and starts its threads anew.
    """
    count = system.threads()
    if count == 1:
        return None
    missing = count - _threads_of_a_child()
    return f"it runs {missing} native threads that a forked child would miss" if missing > 0 else None


def _threads_of_a_child() -> int:
    pid = fork()
    if pid == 0:
        with suppress(Exception):
            if (torch := sys.modules.get("torch")) is not None:
                torch.set_num_threads(torch.get_num_threads())
        os._exit(min(system.threads(), 255))
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return 0  # SIGCHLD is ignored here: nobody learns how a child ended


def fork() -> int:
    """os.fork() without Python 3.12's warning of each thread that it sees before the fork handlers have run; we look
    after they have."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def release_openmp() -> None:
    """End OpenMP's idle worker threads, which a forked child would wait for. They come back when needed."""
    for name in ("libgomp", "libomp", "libiomp5"):
        path = system.loaded_library(name)
        if path is None:
            continue
        pause = getattr(ctypes.CDLL(path), "omp_pause_resource_all", None)
        if pause is not None:
            pause(_OMP_PAUSE_HARD)
