"""The default process group that all examples run in, replaced after each that broke it.

The network connections of the rank are cut then, so that every wait on them fails at once.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
import termios
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torch_testing_ext._torch.groups import made_groups, process_groups, watched_groups
from torch_testing_ext._torch.tensors import dtensor_parts

# A wait in a store is not interrupted: it ends by itself after the first of these times. Creating a new group, to which
# all ranks come, has the longer time: the machine may be busy.
_STORE_TIMEOUT = timedelta(seconds=10)
_CREATION_TIMEOUT = timedelta(seconds=120)
# Meshes and subgroups of the current default group. They end with it.
_cache: dict[Any, Any] = {}


def cached_for_group(key: Any, create: Callable[[], Any]) -> Any:
    """Call `create` once for each default group. All ranks must ask for the same keys in the same order."""
    if key not in _cache:
        _cache[key] = create()
    return _cache[key]


class Groups:
    """Creates and destroys the default process group of a rank.

    The ranks meet through a FileStore. A cut would also end a wait in a TCPStore, but connecting to a TCPStore queries
    a name server, which takes seconds on some machines.
    """

    def __init__(self, rank: int, world_size: int, backend: str, store_path: str, connections: Connections):
        self.rank = rank
        self.world_size = world_size
        self.backend = backend
        self._store_path = store_path
        self._connections = connections
        self._generation = 0

    def create(self) -> None:
        """Create the default group. The previous one, if any, has been destroyed."""
        self._generation += 1
        # torch exports FileStore without listing it, which only strict mypy reports.
        store = dist.FileStore(  # type: ignore[attr-defined, unused-ignore]
            f"{self._store_path}.{self._generation}", self.world_size
        )
        store.set_timeout(_CREATION_TIMEOUT)
        dist.init_process_group(self.backend, store=store, rank=self.rank, world_size=self.world_size)
        store.set_timeout(_STORE_TIMEOUT)
        # All ranks came to the new group, so all of them have destroyed their old one.
        self._connections.release()

    def destroy(self) -> None:
        """Destroy all groups, whatever state they are in."""
        _cache.clear()
        if self._generation == 0:
            if dist.is_initialized():
                # The test's own group: no rank waits in it.
                dist.destroy_process_group()
            return
        # So that gloo has no peer to wait for while it is destroyed.
        self._connections.cut(include_busy=True)
        dtensor_parts.forget_meshes()
        if dist.is_initialized():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dist.destroy_process_group()
        # Ranks left the last example at different collectives.
        watched_groups.forget_groups()


class Connections:
    """The TCP connections that this process opens after this object is created.

    A cut ends only reading, and keeps a connection open even if gloo closes its own descriptor. The reason: if gloo
    learns that the peer is gone while it cannot write a message, it forgets that message, and the sender waits forever.
    So writing must still work, and data that has already arrived must still be read, since the reply may be a write.
    """

    def __init__(self) -> None:
        self._excluded = frozenset(inode for inode, _ in _open_connections())
        # The connections that were cut, by inode.
        self._cut: dict[int, socket.socket] = {}

    def cut(self, include_busy: bool) -> None:
        """Make every wait on the network fail. `include_busy`: also cut connections that still have data to read."""
        if not process_groups.only_gloo():
            process_groups.abort_process_groups()
        for inode, connection in _open_connections():
            if inode in self._excluded or inode in self._cut:
                continue
            if _has_unread(connection) and not include_busy:
                continue
            # The creation of a group has just begun, and the connection may be its own.
            if made_groups.group_in_creation() is not None:
                return
            self._cut[inode] = connection.dup()
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RD)

    def release(self) -> None:
        """Close the connections that were cut. No rank may still wait on them, at either end."""
        for connection in self._cut.values():
            connection.close()
        self._cut.clear()


def _open_connections() -> Iterator[tuple[int, socket.socket]]:
    """Yield the inode and a temporary duplicate of each connected TCP socket of this process."""
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):
            status = os.fstat(int(name))
            if not stat.S_ISSOCK(status.st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.getpeername()
                    yield status.st_ino, connection


def _has_unread(connection: socket.socket) -> bool:
    answer = fcntl.ioctl(connection.fileno(), termios.FIONREAD, bytes(4))
    (size,) = struct.unpack("i", answer)
    return bool(size > 0)
