"""Typed messages between two processes, with file descriptors, over a Unix socket: one line of JSON each."""

from __future__ import annotations

import array
import os
import socket
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from . import messages

Received = TypeVar("Received")

_CHUNK = 1 << 16
_FD_SIZE = array.array("i").itemsize
_ROOM_FOR_FDS = socket.CMSG_LEN(32 * _FD_SIZE)


@dataclass(frozen=True, kw_only=True)
class WithDescriptors:
    """A message that brings file descriptors along: how many when it is sent, which ones when it is received."""

    fds: tuple[int, ...] = ()


class Channel(Generic[Received]):
    """One end of a connection. `receives` is the union of the message types that come from the other end."""

    def __init__(self, sock: socket.socket, receives: Any):
        self._socket = sock
        self._kinds = messages.by_name(receives)
        self._unread = b""
        self._fds: deque[int] = deque()

    @classmethod
    def on(cls, fd: int, receives: Any) -> Channel[Received]:
        """The end whose descriptor was inherited or received."""
        return cls(socket.socket(fileno=fd), receives)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Any, *fds: int) -> None:
        """Send a message. That the other end is gone shows when this end receives."""
        message = replace(message, fds=fds) if fds else message
        line = messages.to_json(message).encode() + b"\n"
        with suppress(BrokenPipeError, ConnectionResetError):
            sent = socket.send_fds(self._socket, [line], fds) if fds else 0
            self._socket.sendall(line[sent:])

    def receive(self) -> list[Received]:
        """Wait until there is something to read; the messages that are complete by then. EOFError at the end."""
        return self._take(0)

    def receive_available(self) -> list[Received]:
        """The messages that have come so far, without waiting; none where the other end is gone."""
        received: list[Received] = []
        with suppress(BlockingIOError, EOFError):
            while True:
                received += self._take(socket.MSG_DONTWAIT)
        return received

    def _take(self, flags: int) -> list[Received]:
        try:
            # Not socket.recv_fds, which ignores its flags: it would wait.
            data, ancillary, _, _ = self._socket.recvmsg(_CHUNK, _ROOM_FOR_FDS, flags)
        except ConnectionResetError:
            data, ancillary = b"", []
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._take_fds(content)
        if not data:
            raise EOFError
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [self._with_fds(messages.from_json(line, self._kinds)) for line in lines]

    def _take_fds(self, content: bytes) -> None:
        fds = array.array("i", content[: len(content) // _FD_SIZE * _FD_SIZE])
        for fd in fds:
            os.set_inheritable(fd, False)
        self._fds.extend(fds)

    def _with_fds(self, message: Any) -> Received:
        if isinstance(message, WithDescriptors):
            message = replace(message, fds=tuple(self._fds.popleft() for _ in message.fds))
        received: Received = message
        return received

    def close(self) -> None:
        self._socket.close()


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets, not on descriptors 0 to 2: this process may have closed some, and a later print would
    write into the connection."""
    with ExitStack() as fillers:
        while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
            fillers.callback(os.close, fd)
        os.close(fd)
        return socket.socketpair()
