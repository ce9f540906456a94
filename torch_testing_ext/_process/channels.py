"""A channel of typed messages and file descriptors between two processes."""

from __future__ import annotations

import array
import os
import socket
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from .messages import LineBuffer, by_name, from_json, to_line

Received = TypeVar("Received")

_BYTES_AT_ONCE = 1 << 16
_FD_SIZE = array.array("i").itemsize
# Linux sends no more in a message (SCM_MAX_FD); the receiver loses those for which it has no room.
_MOST_FDS = 253
_ANCILLARY_SIZE = socket.CMSG_LEN(_MOST_FDS * _FD_SIZE)


@dataclass(frozen=True, kw_only=True)
class WithDescriptors:
    """A message that carries file descriptors: the sender's when it is sent, the receiver's when it is received."""

    fds: tuple[int, ...] = ()


class Channel(Generic[Received]):
    """One end of a connection. `receives` is the union of the message types that the other end sends."""

    def __init__(self, sock: socket.socket, receives: Any):
        self._socket = sock
        self._kinds = by_name(receives)
        self._lines = LineBuffer()
        self._fds: deque[int] = deque()

    @classmethod
    def on(cls, fd: int, receives: Any) -> Channel[Received]:
        """The end on a descriptor that was inherited or received."""
        return cls(socket.socket(fileno=fd), receives)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Any, *fds: int) -> None:
        """Send a message. If the other end is gone, only receiving shows it."""
        if fds:
            message = replace(message, fds=fds)
        line = to_line(message)
        with suppress(BrokenPipeError, ConnectionResetError):
            if fds:
                # Not socket.send_fds: a file of the user's may have hidden the `array` that it needs.
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
                line = line[self._socket.sendmsg([line], [rights]) :]
            self._socket.sendall(line)

    def receive(self) -> list[Received]:
        """Wait for data and return the messages that are complete. Raises EOFError when the other end is closed."""
        return self._receive(0)

    def receive_available(self) -> list[Received]:
        """The messages that have arrived so far, without waiting; none if the other end is gone."""
        received: list[Received] = []
        with suppress(BlockingIOError, EOFError):
            while True:
                received += self._receive(socket.MSG_DONTWAIT)
        return received

    def _receive(self, flags: int) -> list[Received]:
        """Receive data with these flags; return the messages that are complete."""
        try:
            # Not socket.recv_fds: it ignores its flags and would wait.
            data, ancillary, _, _ = self._socket.recvmsg(_BYTES_AT_ONCE, _ANCILLARY_SIZE, flags)
        except ConnectionResetError:
            data, ancillary = b"", []
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._add_fds(content)
        if not data:
            raise EOFError
        received = []
        for line in self._lines.add(data):
            message = from_json(line, self._kinds)
            received.append(self._with_fds(message))
        return received

    def _add_fds(self, content: bytes) -> None:
        """Add the descriptors that came with data; `content` may end in a torn one."""
        whole = len(content) // _FD_SIZE * _FD_SIZE
        fds = array.array("i", content[:whole])
        for fd in fds:
            os.set_inheritable(fd, False)
        self._fds.extend(fds)

    def _with_fds(self, message: Any) -> Received:
        if isinstance(message, WithDescriptors):
            fds = [self._fds.popleft() for _ in message.fds]
            message = replace(message, fds=tuple(fds))
        received: Received = message
        return received

    def close(self) -> None:
        self._socket.close()


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets, never on descriptors 0 to 2.

    If this process has closed one of those, a later print would write into the connection.
    """
    with ExitStack() as fillers:
        while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
            fillers.callback(os.close, fd)
        os.close(fd)
        return socket.socketpair()
