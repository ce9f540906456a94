"""Keeps a rank from leaving while its peers still create a process group that it has created already.

Ranks create a group together, but none learns when the others are done. A rank exits as soon as its test is over,
much sooner than an interpreter, and so would close its connections, and perhaps the store, while a peer is still
connecting.

A rank holds a lock of a file while it creates a group; the kernel releases it if the rank dies. Before a rank
exits, it waits for the locks of its peers, for the groups that it has created itself: its peers have all begun to
create these.
"""

from __future__ import annotations

import fcntl
import functools
import os
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from os import close as os_close, open as os_open
from pathlib import Path
from time import monotonic, sleep

from torch_testing_ext._torch.groups import watched_groups
from torch_testing_ext.launch import RankContext
from torch_testing_ext.launch.causes import is_of_lost_peer
from torch_testing_ext.launch.rank_context import context_here

# A peer that takes longer does not connect: it waits for a rank that will not come.
PEERS_TIMEOUT = 20.0
_FIRST_STEP, _LAST_STEP = 0.0005, 0.1
# Each rank has a byte of its own in the range of each group.
_MOST_RANKS = 1 << 12
_MOST_TIMES = 1 << 12


def announce_creation(context: RankContext) -> None:
    """Let the peers of a rank know from now on while it creates groups."""
    if context.rank < _MOST_RANKS:
        context.group_creation = GroupCreation(context.directory / "creating", context.rank)
        watch_creation()


@functools.cache
def watch_creation() -> None:
    """Note all process groups that this process and its forks make."""
    watched_groups.watch_process_groups(_creating, is_of_lost_peer)


def _creating(name: str) -> AbstractContextManager[None]:
    own = _of_this_process()
    return nullcontext() if own is None else own.creating(name)


def wait_for_peers() -> None:
    """Before we end the rank or its groups: wait until no peer is creating a group that this rank has created."""
    if (own := _of_this_process()) is not None:
        own.wait_for_peers()


def _of_this_process() -> GroupCreation | None:
    """A process that a test forks has none: it may create groups with other processes."""
    context = context_here()
    return None if context is None else context.group_creation


class GroupCreation:
    """The groups that one rank creates, and the locks by which its peers know."""

    def __init__(self, file: Path, rank: int):
        self._file = file
        self._rank = rank
        # How often each group's name was used: destroyed groups give it free.
        self._times: Counter[str] = Counter()
        # Ranges of the groups that this rank has created since it last waited.
        self.created: list[int] = []

    @contextmanager
    def creating(self, name: str) -> Iterator[None]:
        """Hold the lock of a group while this rank creates it."""
        group = _range_of(name, self._times[name])
        self._times[name] += 1
        # A peer that looks holds a lock for a moment.
        descriptor = self.lock(fcntl.LOCK_EX, group + self._rank, 1)
        try:
            yield
            self.created.append(group)
        finally:
            _close(descriptor)

    def wait_for_peers(self) -> None:
        """Wait until no peer is creating a group that this rank has created."""
        groups, self.created = self.created, []
        began = monotonic()
        while groups and (waited := monotonic() - began) < PEERS_TIMEOUT:
            if self.is_complete(groups[-1]):
                groups.pop()
            else:
                # Longer steps the longer it takes: many ranks that wait must not keep the others from creating it.
                sleep(min(max(_FIRST_STEP, waited / 8), _LAST_STEP))

    def is_complete(self, group: int) -> bool:
        """Whether no peer is creating the group."""
        try:
            _close(self.lock(fcntl.LOCK_SH | fcntl.LOCK_NB, group, _MOST_RANKS))
        except BlockingIOError:
            return False
        return True

    def lock(self, kind: int, start: int, length: int) -> int | None:
        """Lock a part of the file; return the descriptor that holds the lock, or None if the file cannot be locked.

        Raises BlockingIOError if a peer holds the lock and `kind` says not to wait.
        """
        try:
            descriptor = os_open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return None
        try:
            fcntl.lockf(descriptor, kind, length, start)
        except BlockingIOError:
            os_close(descriptor)
            raise
        except OSError:
            # No locks on this file system, or a deadlock: then nobody waits.
            os_close(descriptor)
            return None
        return descriptor


def _range_of(name: str, times: int) -> int:
    return (zlib.crc32(name.encode()) * _MOST_TIMES + times % _MOST_TIMES) * _MOST_RANKS


def _close(descriptor: int | None) -> None:
    if descriptor is not None:
        with suppress(OSError):
            os_close(descriptor)
