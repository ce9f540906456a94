"""The network connections of a rank, and how to cut them so that every wait on them fails at once."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
import termios
from collections.abc import Iterator
from contextlib import suppress

from torch_testing_ext import _torch


class Connections:
    """The TCP connections that this process opens after this object is created.

    A cut ends only reading, and keeps a connection open even if gloo closes its own descriptor. The reason: if gloo
    learns that the peer is gone while it cannot write a message, it forgets that message, and the sender waits forever.
    So writing must still work, and data that has already arrived must still be read, since the reply may be a write.
    """

    def __init__(self) -> None:
        self._excluded = frozenset(inode for inode, _ in _open_connections())
        self._held: dict[int, socket.socket] = {}

    def cut(self, include_busy: bool) -> None:
        """Make every wait on the network fail. `include_busy`: also cut connections that still have data to read."""
        if not _torch.launch.only_gloo():
            _torch.launch.abort_process_groups()
        for inode, connection in _open_connections():
            if inode in self._excluded or inode in self._held or (_has_unread(connection) and not include_busy):
                continue
            self._held[inode] = connection.dup()
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RD)

    def release(self) -> None:
        """Close the connections that were cut. No rank may still wait on them, at either end."""
        for connection in self._held.values():
            connection.close()
        self._held.clear()


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
    size: int = struct.unpack("i", fcntl.ioctl(connection.fileno(), termios.FIONREAD, bytes(4)))[0]
    return size > 0
