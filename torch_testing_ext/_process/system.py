"""The differences between operating systems."""

import ctypes
import faulthandler
import functools
import itertools
import math
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from .logs import content_of, text_of

LINUX = sys.platform.startswith("linux")
# macOS can fork, but its frameworks start threads that a child lacks, and there is no way to see them.
CAN_FORK = LINUX
# A real-time signal where they exist: tests use SIGUSR1 and SIGUSR2 for purposes of their own.
DUMP_STACKS: int = signal.SIGRTMAX - 1 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR2
# Answered at once, by faulthandler: see `stacks`.
DUMP_STACKS_NOW: int = DUMP_STACKS - 1 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR1
LOOPBACK = "lo" if LINUX else "lo0"

HUGE_PAGE = 2 << 20
_PIECE = 4 * HUGE_PAGE

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MADV_COLLAPSE = 25
_MAPS = Path("/proc/self/maps")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
# PF_EXITING, of the flags in /proc/PID/stat.
_EXITING = 0x4
# C++ calls these, for as long as the process lives.
_handlers: list[object] = []


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def flush_streams() -> None:
    """Write what the streams of Python and of C hold, also those of Python that a test has replaced."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        # A test may have replaced them by anything.
        with suppress(Exception):
            stream.flush()  # type: ignore[union-attr]
    _libc().fflush(None)


def _prctl(option: int, value: int) -> None:
    if LINUX:
        _libc().prctl(option, value, 0, 0, 0)


def die_with(parent: int, by: int) -> None:
    """Request signal `by` for when the process `parent` ends. If it has ended already, exit at once."""
    _prctl(_PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent, instead of init, of processes that our children leave behind, so that they can be ended."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def before_abort(act: Callable[[], None]) -> None:
    """Call `act` when an exception that no C++ code catches is about to abort this process: a thread of gloo may raise.

    It is called once, in the thread that has raised, and not in processes that this one forks.
    """
    try:
        # std::set_terminate
        set_handler = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
    except (OSError, AttributeError):
        # Another runtime.
        return
    handler = ctypes.CFUNCTYPE(None)
    pid = os.getpid()
    # Empty when it has been called.
    left = [act]

    def call() -> None:
        with suppress(BaseException):
            if os.getpid() == pid and left:
                act_once = left.pop()
                act_once()
        call_before = handler(before)
        call_before()

    kept = handler(call)
    _handlers.append(kept)
    set_handler.restype, set_handler.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    before = set_handler(ctypes.cast(kept, ctypes.c_void_p))


def cores() -> int:
    """The cores this process may use."""
    if LINUX:
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def use_batch_scheduling() -> None:
    """Do not preempt other threads when this thread, or one that it starts, wakes up.

    A gloo thread that wakes its peer by a write would be preempted while it holds a lock, and another thread would
    spin on the lock: with more ranks than cores, collectives take two to three times the CPU.
    """
    if LINUX:
        # A sandbox may forbid it.
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def threads() -> int:
    """The number of threads of this process, including native ones. 1 if the system does not show it."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 1


def names_of_native_threads() -> list[str]:
    """The names of this process's threads that `threading` does not know, but for those that have its own."""
    own = text_of(Path("/proc/self/comm")).strip()
    # Since Python 3.14 the system has the names of these, too.
    of_python = {str(thread.native_id) for thread in threading.enumerate()}
    files = (file for file in Path("/proc/self/task").glob("*/comm") if file.parent.name not in of_python)
    names = (text_of(file).strip() for file in files)
    return sorted(name for name in names if name not in ("", own))


def children(pid: int) -> list[int]:
    """The children of a process; none if the system does not show them."""
    pids = text_of(Path(f"/proc/{pid}/task/{pid}/children"))
    return [int(child) for child in pids.split()]


def descendants(pid: int) -> list[int]:
    below = children(pid)
    deeper = [descendants(child) for child in below]
    return below + list(itertools.chain.from_iterable(deeper))


def _ancestors(pid: int) -> Iterator[int]:
    """Yield a process and those that have started it, as far as the system shows them."""
    while pid > 0:
        yield pid
        stat = _stat(pid)
        pid = int(stat[1]) if stat else 0


def _name(pid: int) -> str:
    return text_of(Path(f"/proc/{pid}/comm")).strip()


def starter(parent: int, names: Iterable[str]) -> int:
    """The process that has started the child of this parent: the next one with such a name, else the parent."""
    return next((pid for pid in _ancestors(parent) if _name(pid) in names), parent)


# The number of the first namespace of processes, the same in all kernels.
_PIDS_OF_HOST = 0xEFFFFFFC


def has_pids_of_host() -> bool:
    """Whether this process has the numbers of processes that the host has. Not in most containers."""
    with suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino == _PIDS_OF_HOST
    return False


def group_members(group: int) -> list[int]:
    """The living members of a process group."""
    members = []
    for pid in _all_pids():
        state, _, of_group, *_ = _stat(pid) or ("X", "", "")
        if of_group == str(group) and state not in "ZX":
            members.append(pid)
    return members


def is_ending(pid: int) -> bool:
    """Whether a process has begun to exit. It runs no more code, though it may take a while to return its memory."""
    stat = _stat(pid)
    return not stat or bool(int(stat[6]) & _EXITING)


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, as by SIGSTOP."""
    return _stat(pid)[:1] == ["T"]


class _SignalEvent(ctypes.Structure):
    """`struct sigevent`: SIGEV_SIGNAL with a signal."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_long * 6),
    )


def continue_after(seconds: float) -> None:
    """Have the system send SIGCONT to this process then, which may be stopped. Linux."""
    timer = ctypes.c_void_p()
    event = _SignalEvent(None, signal.SIGCONT, 0)
    when = (ctypes.c_long * 4)(0, 0, int(seconds), max(1, int(seconds % 1 * 1e9)))
    failed = _libc().timer_create(1, ctypes.byref(event), ctypes.byref(timer))
    if failed or _libc().timer_settime(timer, 0, when, None):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def may_start_thread() -> bool:
    """Try to start one more thread. It is one of C: who writes stacks meanwhile would see one of Python half-made."""
    libc = _libc()
    thread = ctypes.c_void_p()
    if libc.pthread_create(ctypes.byref(thread), None, libc.getpid, None):
        return False
    libc.pthread_join(thread, None)
    return True


def hold_gil(seconds: float) -> None:
    """Sleep without releasing the GIL."""
    ctypes.PyDLL(None).poll(None, 0, ctypes.c_int(int(seconds * 1000)))


def die_by(number: int) -> NoReturn:
    """Let a signal end this process, whatever handlers there are. Leaves no core file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        faulthandler.disable()
        # Handlers of C++ or of Python; only the main thread may call signal.signal.
        _libc().signal(number, None)
    os.kill(os.getpid(), number)
    while True:
        # It may reach another thread first.
        signal.pause()


def command_of(pid: int) -> str:
    """The beginning of the command line of a process; "" if the process cannot be seen."""
    words = text_of(Path(f"/proc/{pid}/cmdline")).replace("\0", " ").split()
    return " ".join(words)[:80]


def describe(pid: int) -> str:
    """A process by its pid and the beginning of its command line."""
    command = command_of(pid)
    return f"pid {pid}: {command}" if command else f"pid {pid}"


def _all_pids() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    except OSError:
        return []


def environments(names: Iterable[str]) -> Iterator[tuple[dict[str, str], int]]:
    """Yield the variables of each other process of this user that was started with one of these, and its parent."""
    own = os.getpid()
    signs = [f"{name}=".encode() for name in names]
    for pid in _all_pids():
        content = b"" if pid == own else content_of(Path(f"/proc/{pid}/environ"))
        if any(sign in content for sign in signs):
            pairs = (os.fsdecode(entry).partition("=") for entry in content.split(b"\0"))
            stat = _stat(pid)
            if stat:
                yield {name: value for name, _, value in pairs}, int(stat[1])


def _stat(pid: int) -> list[str]:
    """Return the words of a process in /proc, from its state on; none if the system does not show them."""
    return text_of(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()


def cpu_seconds(pid: int) -> float | None:
    """The CPU time of all threads of a process, in steps of 0.01 s; None if the system does not show it.

    Infinite if its main thread is running or wants to: then the process is computing, however little it has got.
    """
    stat = _stat(pid)
    if not stat:
        return None
    if stat[0] == "R":
        return math.inf
    ticks = int(stat[11]) + int(stat[12])
    return ticks / _TICKS_PER_SECOND


def may_spin(pid: int) -> bool:
    """Whether a process uses a GPU. It may then compute while it only waits for the device."""
    return any(path.startswith(("/dev/nvidia", "/dev/kfd")) for path in opened(pid))


def opened(pid: int | str) -> Iterator[str]:
    """The files that a process has open; nothing if it has ended, or the system does not show it."""
    folder = f"/proc/{pid}/fd"
    with suppress(OSError):
        for fd in os.listdir(folder):
            # The descriptor of the listing itself is closed.
            with suppress(OSError):
                yield os.readlink(f"{folder}/{fd}")


def loaded_library(name: str) -> str | None:
    """The path of a shared library that this process has loaded, by the beginning of its file name."""
    for line in text_of(_MAPS).splitlines():
        path = line.partition("/")[2]
        if path.rpartition("/")[2].startswith(name):
            return "/" + path
    return None


def memory_regions() -> list[tuple[int, int]]:
    """The large private writable mappings without a file, whose page tables a fork has to copy.

    In pieces of whole huge pages: if a piece began elsewhere, the kernel would leave its edges as they are.
    """
    regions = []
    for line in text_of(_MAPS).splitlines():
        span, mode, _, _, _, *name = line.split(maxsplit=5)
        if mode.startswith("rw-p") and (not name or name[0] == "[heap]"):
            start, end = (int(part, 16) for part in span.split("-"))
            # Whole huge pages: the first one that begins in it, and the last one that ends in it.
            start = math.ceil(start / HUGE_PAGE) * HUGE_PAGE
            end = end // HUGE_PAGE * HUGE_PAGE
            for at in range(start, end, _PIECE):
                regions.append((at, min(_PIECE, end - at)))
    return regions


def collapse_all() -> None:
    """Collapse all regions whose page tables a fork has to copy; takes up to half a second."""
    for region in memory_regions():
        collapse(*region)


def collapse(start: int, length: int) -> None:
    """Have the kernel collapse a region into huge pages (Linux 6.1 and newer; elsewhere nothing happens)."""
    if LINUX:
        _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_COLLAPSE)
