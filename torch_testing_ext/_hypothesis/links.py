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

from torch_testing_ext._process.channels import Channel, WithDescriptors, socket_pair
from torch_testing_ext._process.private_folders import socket_name
from torch_testing_ext.launch import Cause

from .example_outcomes import ExampleOutcome, PropertyResult

_CONNECT_TIMEOUT = 120.0


class PeerLost(RuntimeError):
    """A rank has died or can no longer be reached."""

    def __init__(self, message: str, example: str = ""):
        super().__init__(message)
        self.example_of_failure = example


class PeerLostElsewhere(PeerLost):
    """The same, in a rank that only suffers from it: another one reports it."""

    cause_of_failure = Cause.LOST_PEER


@dataclass(frozen=True)
class LinkOpened(WithDescriptors):
    """The first message of a link. It carries the end of rank 0 of the connection between the watchdogs."""

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


WatchdogMessage = ExampleLeft | InterruptExample | StopWatching


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
        """Whether the other rank has closed its end."""
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
        with suppress(EOFError, OSError):
            while True:
                self._main.receive()

    def close(self) -> None:
        self._main.close()
        self.watchdog.close()


def connect_ranks(file_name: str, rank: int, world_size: int) -> dict[int, Link]:
    """Return the links of this rank: rank 0 gets one to every other rank, and every other rank gets one to rank 0."""
    if world_size == 1:
        return {}
    with socket_name(f"{file_name}.ranks") as address:
        if rank == 0:
            return _accept(address, world_size)
        return {0: _connect(address, rank)}


def _accept(address: str, world_size: int) -> dict[int, Link]:
    """Return the links to all other ranks. None of them sends more than its first message before rank 0 does."""
    with suppress(FileNotFoundError):
        # Left by an earlier property of the same test.
        os.unlink(address)
    links: dict[int, Link] = {}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(world_size)
        while len(links) < world_size - 1:
            connection, _ = listener.accept()
            main: Channel[MainMessage] = Channel(connection, MainMessage)
            received: list[MainMessage] = []
            while not received:
                received = main.receive()
            (opened,) = received
            assert isinstance(opened, LinkOpened)
            (of_watchdog,) = opened.fds
            links[opened.rank] = Link(main, Channel.on(of_watchdog, WatchdogMessage))
    os.unlink(address)
    # Outcomes are received in this order, and told apart by it.
    return dict(sorted(links.items()))


def _connect(address: str, rank: int) -> Link:
    main: Channel[MainMessage] = Channel(_connected(address), MainMessage)
    mine, of_rank_0 = socket_pair()
    with of_rank_0:
        main.send(LinkOpened(rank), of_rank_0.fileno())
    return Link(main, Channel(mine, WatchdogMessage))


def _connected(address: str) -> socket.socket:
    """Connect to rank 0, which may have yet to listen."""
    until = time.monotonic() + _CONNECT_TIMEOUT
    while True:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(address)
        except OSError as error:
            sock.close()
            may_come = error.errno in (errno.ENOENT, errno.ECONNREFUSED)
            if not may_come or time.monotonic() > until:
                raise
            # Rank 0 does not listen yet.
            time.sleep(0.001)
        else:
            return sock
