"""Messages between the runner's processes: one line of JSON each, with file descriptors, over a Unix socket."""

from __future__ import annotations

import json
import os
import socket
from collections import deque
from contextlib import suppress
from typing import Any

Message = dict[str, Any]

_CHUNK = 1 << 16
_MOST_FDS = 32


class Channel:
    def __init__(self, sock: socket.socket):
        self._socket = sock
        self._unread = b""
        self._fds: deque[int] = deque()

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        ours, theirs = socket.socketpair()
        return cls(ours), cls(theirs)

    @classmethod
    def on(cls, fd: int) -> Channel:
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message, *fds: int) -> None:
        """To whom is gone, nothing can be said: that he is shows when we listen."""
        line = json.dumps({**message, "fds": len(fds)} if fds else message).encode() + b"\n"
        with suppress(BrokenPipeError, ConnectionResetError):
            sent = socket.send_fds(self._socket, [line], fds) if fds else 0
            self._socket.sendall(line[sent:])

    def receive(self) -> list[Message]:
        """Wait until there is something to read; the messages that are complete by then. EOFError at the end.

        The descriptors of a message are under its key "fds".
        """
        return self._take(0)

    def receive_available(self) -> list[Message]:
        """What has come so far, without waiting; nothing where the other end is gone."""
        messages: list[Message] = []
        with suppress(BlockingIOError, EOFError):
            while True:
                messages += self._take(socket.MSG_DONTWAIT)
        return messages

    def _take(self, flags: int) -> list[Message]:
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, _CHUNK, _MOST_FDS, flags)
        except ConnectionResetError:
            data, fds = b"", []
        for fd in fds:
            os.set_inheritable(fd, False)
        self._fds.extend(fds)
        if not data:
            raise EOFError
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [self._with_fds(json.loads(line)) for line in lines]

    def _with_fds(self, message: Message) -> Message:
        if "fds" in message:
            message["fds"] = [self._fds.popleft() for _ in range(message["fds"])]
        return message

    def close(self) -> None:
        self._socket.close()
