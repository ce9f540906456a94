"""Messages between rank 0 and each other rank, through sockets of their own: no process group is needed, or harmed.

Two connections a rank. `talk` carries examples and outcomes, and only the main threads use it; `alarm` is silent
until a rank leaves an example early, and only the watching threads listen to it. So no thread has to be woken while
all is well.
"""

from __future__ import annotations

import errno
import os
import select
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener

_LONGEST_PATH = 100  # of a Unix socket's address, everywhere
_MEETING_TIMEOUT = 120.0


class PeerLost(RuntimeError):
    """A rank is gone, or cannot be reached any more."""


@dataclass
class Link:
    """The two connections with one other rank."""

    talk: Connection
    alarm: Connection

    def __post_init__(self) -> None:
        self._poll = select.poll()  # Connection.poll would make one each time
        self._poll.register(self.talk, select.POLLIN)

    def has_news(self, timeout: float) -> bool:
        return bool(self._poll.poll(1000 * timeout))

    def close(self) -> None:
        self.talk.close()
        self.alarm.close()


def meet(file_name: str, rank: int, world_size: int) -> dict[int, Link]:
    """Rank 0 gets a link to every other rank, each other rank one to rank 0."""
    if world_size == 1:
        return {}
    with _address(file_name + ".ranks") as address:
        return _wait_for_others(address, world_size) if rank == 0 else {0: _call(address, rank)}


class _address:
    """The file's path as an address: by its directory's descriptor where the path is too long for one."""

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


def _wait_for_others(address: str, world_size: int) -> dict[int, Link]:
    found: dict[tuple[int, str], Connection] = {}
    with suppress(FileNotFoundError):
        os.unlink(address)  # a property that ran before this one in the same test
    with Listener(address, "AF_UNIX", backlog=2 * world_size) as listener:
        while len(found) < 2 * (world_size - 1):
            connection = listener.accept()
            found[connection.recv()] = connection
    return {rank: Link(found[rank, "talk"], found[rank, "alarm"]) for rank in range(1, world_size)}


def _call(address: str, rank: int) -> Link:
    talk, alarm = _connect(address), _connect(address)
    talk.send((rank, "talk"))
    alarm.send((rank, "alarm"))
    return Link(talk, alarm)


def _connect(address: str) -> Connection:
    until = time.monotonic() + _MEETING_TIMEOUT
    while True:
        try:
            return Client(address, "AF_UNIX")
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ECONNREFUSED) or time.monotonic() > until:
                raise
            time.sleep(0.001)  # rank 0 is not there yet
