"""The network connections of a rank, and how to cut them so that whatever waits on them gives up at once."""

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
    """The TCP connections that this process makes from now on.

    A cut ends reading alone, and keeps the connection open when gloo has closed it. For gloo forgets a message that it
    could not write while it learns that its peer is gone: who sends it then waits for ever. So writing must go on, and
    what has come in already must be read, as to answer it may be to write.
    """

    def __init__(self) -> None:
        self._spared = frozenset(inode for inode, _ in _connections())
        self._held: dict[int, socket.socket] = {}

    def cut(self, busy_ones: bool) -> None:
        """Make every wait on the network fail. `busy_ones`: also on connections that still have something to read."""
        if not _torch.only_gloo():
            _torch.abort_process_groups()
        for inode, wire in _connections():
            if inode in self._spared or inode in self._held or (_has_unread(wire) and not busy_ones):
                continue
            self._held[inode] = wire.dup()
            with suppress(OSError):
                wire.shutdown(socket.SHUT_RD)

    def let_go(self) -> None:
        """Nobody waits any more, here or at the other ends."""
        for wire in self._held.values():
            wire.close()
        self._held.clear()


def _connections() -> Iterator[tuple[int, socket.socket]]:
    """The connected TCP sockets of this process, each as a duplicate for the moment, with its inode."""
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):
            status = os.fstat(int(name))
            if not stat.S_ISSOCK(status.st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.getpeername()
                    yield status.st_ino, connection


def _has_unread(wire: socket.socket) -> bool:
    (size,) = struct.unpack("i", fcntl.ioctl(wire.fileno(), termios.FIONREAD, bytes(4)))
    return size > 0
