"""Messages between rank 0 and each other rank, through sockets of their own, independent of any process group.

Each link has two connections. The main one carries examples and outcomes, and only the main threads use it. The one of
the watchdogs is silent until a rank leaves an example early. So no extra thread runs while all is well.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from torch_testing_ext._process.channel import Channel
from torch_testing_ext.launch import Cause

from .outcome import ExampleOutcome, PropertyResult

_LONGEST_PATH = 100  # the address of a Unix socket may be this long on every platform
_CONNECT_TIMEOUT = 120.0


class PeerLost(RuntimeError):
    """A rank has died or can no longer be reached."""


class PeerLostElsewhere(PeerLost):
    """The same, in a rank that only suffers from it: another one reports it."""

    cause_of_failure = Cause.LOST_PEER


# -- messages


@dataclass(frozen=True)
class LinkOpened:
    """The first message of a connection."""

    rank: int


@dataclass(frozen=True)
class RunExample:
    """An example, from rank 0. `drawn`: pickled values by name. `interactive`: arguments that are drawn in the test."""

    number: int
    drawn: bytes
    interactive: tuple[str, ...]


@dataclass(frozen=True)
class DrawnValue:
    """The next value that the example draws, pickled."""

    value: bytes


@dataclass(frozen=True)
class NoMoreValues:
    """Rank 0 draws no more in this example."""


@dataclass(frozen=True)
class RecreateGroups:
    """All ranks are to replace their groups."""


@dataclass(frozen=True)
class PropertyEnds:
    """The property has ended."""

    result: PropertyResult


@dataclass(frozen=True)
class ExampleEnds:
    """The example has ended in a rank other than 0."""

    outcome: ExampleOutcome


@dataclass(frozen=True)
class GroupsRecreated:
    """The answer to RecreateGroups."""


MainMessage = (
    LinkOpened | RunExample | DrawnValue | NoMoreValues | RecreateGroups | PropertyEnds | ExampleEnds | GroupsRecreated
)


@dataclass(frozen=True)
class ExampleLeft:
    """A rank has left the example early."""

    number: int


@dataclass(frozen=True)
class InterruptExample:
    """The rank is to interrupt its waits in the example."""

    number: int


@dataclass(frozen=True)
class StopWatching:
    """The watchdog is to end."""


WatchdogMessage = LinkOpened | ExampleLeft | InterruptExample | StopWatching

M = TypeVar("M")


class Link:
    """The two connections to one other rank."""

    def __init__(self, main: Channel[MainMessage], watchdog: Channel[WatchdogMessage]):
        self._main = main
        self.watchdog = watchdog
        self._received: deque[MainMessage] = deque()
        self._poll = select.poll()
        self._poll.register(main, select.POLLIN)

    def send(self, message: MainMessage) -> None:
        """Send a message. If the other rank is gone, nothing happens."""
        with suppress(OSError):
            self._main.send(message)

    @property
    def is_lost(self) -> bool:
        """Has the other rank closed its end?"""
        return any(event & select.POLLHUP for _, event in self._poll.poll(0))

    def has_message(self, timeout: float) -> bool:
        """Wait for a message, or the end of the other rank, for at most that many seconds."""
        return bool(self._received) or bool(self._poll.poll(1000 * timeout))

    def receive(self) -> MainMessage:
        """Wait for a message. Raises EOFError or OSError if the other rank is gone."""
        while not self._received:
            self._received.extend(self._main.receive())
        return self._received.popleft()

    def wait_until_gone(self) -> None:
        """Wait until the other rank has exited."""
        with suppress(EOFError, OSError):
            while True:
                self._main.receive()

    def close(self) -> None:
        self._main.close()
        self.watchdog.close()


# -- connecting


def connect_ranks(file_name: str, rank: int, world_size: int) -> dict[int, Link]:
    """Return the links of this rank: rank 0 gets one to every other rank, and every other rank gets one to rank 0."""
    if world_size == 1:
        return {}
    with _SocketAddress(file_name + ".ranks") as main, _SocketAddress(file_name + ".watchdogs") as watchdog:
        if rank > 0:
            return {0: Link(_connect(main, rank, MainMessage), _connect(watchdog, rank, WatchdogMessage))}
        with _listen(main, world_size) as for_main, _listen(watchdog, world_size) as for_watchdogs:
            mains: dict[int, Channel[MainMessage]] = _accept(for_main, world_size, MainMessage)
            watchdogs: dict[int, Channel[WatchdogMessage]] = _accept(for_watchdogs, world_size, WatchdogMessage)
        return {rank: Link(mains[rank], watchdogs[rank]) for rank in range(1, world_size)}


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


def _listen(address: str, world_size: int) -> socket.socket:
    with suppress(FileNotFoundError):
        os.unlink(address)  # left by an earlier property of the same test
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(world_size)
    return listener


def _accept(listener: socket.socket, world_size: int, receives: object) -> dict[int, Channel[M]]:
    """The connections of all other ranks. None of them sends more than its first message before rank 0 does."""
    found: dict[int, Channel[M]] = {}
    while len(found) < world_size - 1:
        channel: Channel[M] = Channel(listener.accept()[0], receives)
        opened: list[M] = []
        while not opened:
            opened = channel.receive()
        assert isinstance(opened[0], LinkOpened)
        found[opened[0].rank] = channel
    os.unlink(listener.getsockname())
    return found


def _connect(address: str, rank: int, receives: object) -> Channel[M]:
    until = time.monotonic() + _CONNECT_TIMEOUT
    while True:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(address)
        except OSError as error:
            sock.close()
            if error.errno not in (errno.ENOENT, errno.ECONNREFUSED) or time.monotonic() > until:
                raise
            time.sleep(0.001)  # rank 0 does not listen yet
        else:
            channel: Channel[M] = Channel(sock, receives)
            channel.send(LinkOpened(rank))
            return channel
