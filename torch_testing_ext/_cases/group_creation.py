"""Keeps a rank from leaving while its peers still create a process group that it has created already.

Ranks create a group together, but none learns when the others are done. A rank exits as soon as its test is over, much
sooner than an interpreter, and so would close its connections, and perhaps the store, while a peer is still connecting.

A rank holds a lock of a file while it creates a group; the kernel releases it if the rank dies. Before a rank exits, it
waits for the locks of its peers, for the groups that it has created itself: its peers have all begun to create these.
"""

from __future__ import annotations

import fcntl
import os
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torch_testing_ext import _torch

__rank_frame__ = True

# A peer that takes longer does not connect: it waits for a rank that will not come.
PATIENCE = 20.0
_FIRST_STEP, _LAST_STEP = 0.0005, 0.1
# Each rank has a byte of its own in the range of each group.
_MOST_RANKS = 1 << 12
_MOST_TIMES = 1 << 12

_file: Path | None = None
_rank = 0
_pid = 0  # of the rank: a process that a test forks may create groups with other processes
_times: Counter[str] = Counter()  # how often each group's name was used: destroyed groups give it free
_created: list[int] = []  # ranges of the groups that this process has created since it last waited


def announce(directory: Path, rank: int) -> None:
    """In a rank: let its peers know from now on while it creates groups. All ranks name the same directory.

    A process that is a rank in several tests calls it for each of them.
    """
    global _file, _rank, _pid
    if rank < _MOST_RANKS:
        watches = _pid == os.getpid()
        _file, _rank, _pid = directory / "creating", rank, os.getpid()
        _times.clear()
        _created.clear()
        if not watches:
            _torch.watch_process_groups(_creating)


@contextmanager
def _creating(name: str) -> Iterator[None]:
    if os.getpid() != _pid:
        yield
        return
    group = _range_of(name, _times[name])
    _times[name] += 1
    descriptor = _lock(fcntl.LOCK_EX, group + _rank, 1)  # a peer that looks holds a lock for a moment
    try:
        yield
        _created.append(group)
    finally:
        _close(descriptor)


def wait_for_peers() -> None:
    """Before we end the rank or its groups: wait until no peer is creating a group that this rank has created."""
    if os.getpid() != _pid:
        return
    groups, _created[:] = [*_created], []
    began = time.monotonic()
    while groups and (waited := time.monotonic() - began) < PATIENCE:
        if _try_lock(groups[-1]):
            groups.pop()
        else:
            # Longer steps the longer it takes: many ranks that wait must not keep the others from creating the group.
            time.sleep(min(max(_FIRST_STEP, waited / 8), _LAST_STEP))


def _range_of(name: str, times: int) -> int:
    return (zlib.crc32(name.encode()) * _MOST_TIMES + times % _MOST_TIMES) * _MOST_RANKS


def _try_lock(group: int) -> bool:
    try:
        descriptor = _lock(fcntl.LOCK_SH | fcntl.LOCK_NB, group, _MOST_RANKS)
    except BlockingIOError:
        return False
    _close(descriptor)
    return True


def _lock(kind: int, start: int, length: int) -> int | None:
    """Lock a part of the file; return the descriptor that holds the lock, or None if the file cannot be locked.

    Raises BlockingIOError if a peer holds the lock and `kind` says not to wait.
    """
    assert _file is not None
    try:
        descriptor = os.open(_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        fcntl.lockf(descriptor, kind, length, start)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:  # no locks on this file system, or a deadlock: then nobody waits
        os.close(descriptor)
        return None
    return descriptor


def _close(descriptor: int | None) -> None:
    if descriptor is not None:
        with suppress(OSError):
            os.close(descriptor)
