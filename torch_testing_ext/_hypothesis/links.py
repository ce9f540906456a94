"""Messages between rank 0 and each other rank, through sockets of their own, independent of any process group.

Each link has two connections. `main` carries examples and outcomes, and only the main threads use it. `watchdog` is
silent until a rank leaves an example early, and only the watchdogs use it. So no extra thread runs while all is
well.
"""

from __future__ import annotations

import errno
import os
import select
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener

_LONGEST_PATH = 100  # the address of a Unix socket may be this long on every platform
_CONNECT_TIMEOUT = 120.0


class PeerLost(RuntimeError):
    """A rank has died or can no longer be reached."""


@dataclass
class Link:
    """The two connections to one other rank."""

    main: Connection
    watchdog: Connection

    def __post_init__(self) -> None:
        self._poll = select.poll()  # Connection.poll would create one for each call
        self._poll.register(self.main, select.POLLIN)

    def has_message(self, timeout: float) -> bool:
        return bool(self._poll.poll(1000 * timeout))

    def close(self) -> None:
        self.main.close()
        self.watchdog.close()


def connect_ranks(file_name: str, rank: int, world_size: int) -> dict[int, Link]:
    """Return the links of this rank: rank 0 gets one to every other rank, and every other rank gets one to rank 0."""
    if world_size == 1:
        return {}
    with _SocketAddress(file_name + ".ranks") as address:
        return _accept_others(address, world_size) if rank == 0 else {0: _connect_to_leader(address, rank)}


class _SocketAddress:
    """The address of a Unix socket at a path: through a descriptor of its directory if the path is too long."""

    def __init__(self, path: str):
        self.path = path
        self.directory: int | None = None

    def __enter__(self) -> str:
        if len(os.fsencode(self.path)) <= _LONGEST_PATH:
            return self.path
        head, tail = os.path.split(self.path)
        self.directory = os.open(head, os.O_RDONLY)
        return f"/proc/self/fd/{self.directory}/{tail}"

    def __exit__(self, *exc: object) -> None:
        if self.directory is not None:
            os.close(self.directory)


def _accept_others(address: str, world_size: int) -> dict[int, Link]:
    found: dict[tuple[int, str], Connection] = {}
    with suppress(FileNotFoundError):
        os.unlink(address)  # left by an earlier property of the same test
    with Listener(address, "AF_UNIX", backlog=2 * world_size) as listener:
        while len(found) < 2 * (world_size - 1):
            connection = listener.accept()
            found[connection.recv()] = connection
    return {rank: Link(found[rank, "main"], found[rank, "watchdog"]) for rank in range(1, world_size)}


def _connect_to_leader(address: str, rank: int) -> Link:
    main, watchdog = _connect(address), _connect(address)
    main.send((rank, "main"))
    watchdog.send((rank, "watchdog"))
    return Link(main, watchdog)


def _connect(address: str) -> Connection:
    until = time.monotonic() + _CONNECT_TIMEOUT
    while True:
        try:
            return Client(address, "AF_UNIX")
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ECONNREFUSED) or time.monotonic() > until:
                raise
            time.sleep(0.001)  # rank 0 does not listen yet
