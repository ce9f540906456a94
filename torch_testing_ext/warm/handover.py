"""Messages between a client, the stages and the keeper of a program: one JSON object each, with file descriptors."""

from __future__ import annotations

import fcntl
import json
import os
import socket

TYPE_CHECKING = False  # importing typing takes a tenth of the client's time
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

KIND = socket.SOCK_SEQPACKET
_LARGEST = 1 << 20


def send(sock: socket.socket, message: dict[str, Any], fds: Iterable[int] = ()) -> None:
    """Send a message. Raises OSError if it is too large for the system, or the other end is gone."""
    socket.send_fds(sock, [json.dumps(message).encode()], list(fds))


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Wait for a message. Raises EOFError when the other end is gone."""
    try:
        data, fds, _, _ = socket.recv_fds(sock, _LARGEST, 253)  # Linux sends no more descriptors in a message
    except ConnectionError:
        raise EOFError from None
    for fd in fds:
        os.set_inheritable(fd, False)
    if not data:
        raise EOFError
    return json.loads(data), fds


def signal_news(sock: socket.socket) -> None:
    """From now on, `receive` does not wait, and this process gets SIGIO when there is something to receive."""
    sock.setblocking(False)
    fcntl.fcntl(sock, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(sock, fcntl.F_SETFL, fcntl.fcntl(sock, fcntl.F_GETFL) | os.O_ASYNC)
