"""Links between the ranks of a property, their group, and the watchdog that interrupts a wait."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import socket
import stat
import struct
import sys
import termios
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torch_testing_ext._process.child_processes import EventLoop
from torch_testing_ext._process.messages import Channel, WithDescriptors, socket_pair
from torch_testing_ext._process.private_folders import socket_name
from torch_testing_ext._torch import flight_recorder, process_state, sharding
from torch_testing_ext.launch import Cause

from .examples import ExampleOutcome, PropertyResult

# --------------------------------------------------------------------------------------------------------------------
# The default process group that examples run in: shared by all examples, and replaced after each that broke it.
#
# The network connections of the rank are cut then, so that every wait on them fails at once.

# A wait in a store is not interrupted: it ends by itself after the first of these times. Creating a new group, to which
# all ranks come, has the longer time: the machine may be busy.
_STORE_TIMEOUT = timedelta(seconds=10)
_CREATION_TIMEOUT = timedelta(seconds=120)

# Meshes and subgroups of the current default group. They end with it.
_cache: dict[Any, Any] = {}


def cached_for_group(key: Any, create: Callable[[], Any]) -> Any:
    """Call `create` once for each default group. All ranks must ask for the same keys in the same order."""
    if key not in _cache:
        _cache[key] = create()
    return _cache[key]


class Groups:
    """Creates and destroys the default process group of a rank.

    The ranks meet through a FileStore. A cut would also end a wait in a TCPStore, but connecting to a TCPStore queries
    a name server, which takes seconds on some machines.
    """

    def __init__(self, rank: int, world_size: int, backend: str, store_path: str, connections: Connections):
        self.rank = rank
        self.world_size = world_size
        self.backend = backend
        self._store_path = store_path
        self._connections = connections
        self._generation = 0

    def create(self) -> None:
        """Create the default group. The previous one, if any, has been destroyed."""
        self._generation += 1
        # torch exports FileStore without listing it, which only strict mypy reports.
        store = dist.FileStore(  # type: ignore[attr-defined, unused-ignore]
            f"{self._store_path}.{self._generation}", self.world_size
        )
        store.set_timeout(_CREATION_TIMEOUT)
        dist.init_process_group(self.backend, store=store, rank=self.rank, world_size=self.world_size)
        store.set_timeout(_STORE_TIMEOUT)
        # All ranks came to the new group, so all of them have destroyed their old one.
        self._connections.release()

    def destroy(self) -> None:
        """Destroy all groups, whatever state they are in."""
        _cache.clear()
        if self._generation == 0:
            if dist.is_initialized():
                # The test's own group: no rank waits in it.
                dist.destroy_process_group()
            return
        # So that gloo has no peer to wait for while it is destroyed.
        self._connections.cut(include_busy=True)
        sharding.forget_meshes()
        if dist.is_initialized():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dist.destroy_process_group()
        # Ranks left the last example at different collectives.
        flight_recorder.forget_groups()


# -- the connections


class Connections:
    """The TCP connections that this process opens after this object is created.

    A cut ends only reading, and keeps a connection open even if gloo closes its own descriptor. The reason: if gloo
    learns that the peer is gone while it cannot write a message, it forgets that message, and the sender waits forever.
    So writing must still work, and data that has already arrived must still be read, since the reply may be a write.
    """

    def __init__(self) -> None:
        self._excluded = frozenset(inode for inode, _ in _open_connections())
        # The connections that were cut, by inode.
        self._cut: dict[int, socket.socket] = {}

    def cut(self, include_busy: bool) -> None:
        """Make every wait on the network fail. `include_busy`: also cut connections that still have data to read."""
        if not process_state.only_gloo():
            process_state.abort_process_groups()
        for inode, connection in _open_connections():
            if inode in self._excluded or inode in self._cut:
                continue
            if _has_unread(connection) and not include_busy:
                continue
            # The creation of a group has just begun, and the connection may be its own.
            if flight_recorder.group_in_creation() is not None:
                return
            self._cut[inode] = connection.dup()
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RD)

    def release(self) -> None:
        """Close the connections that were cut. No rank may still wait on them, at either end."""
        for connection in self._cut.values():
            connection.close()
        self._cut.clear()


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
    answer = fcntl.ioctl(connection.fileno(), termios.FIONREAD, bytes(4))
    (size,) = struct.unpack("i", answer)
    return bool(size > 0)


# --------------------------------------------------------------------------------------------------------------------
# Messages between rank 0 and each other rank, through sockets of their own, independent of any process group.
#
# Each link has two connections. The main one carries examples and outcomes, and only the main threads use it. The one
# of the watchdogs is silent until a rank leaves an example early. So no extra thread runs while all is well.

_CONNECT_TIMEOUT = 120.0


class PeerLost(RuntimeError):
    """A rank has died or can no longer be reached."""

    def __init__(self, message: str, example: str = ""):
        super().__init__(message)
        self.example_of_failure = example


class PeerLostElsewhere(PeerLost):
    """The same, in a rank that only suffers from it: another one reports it."""

    cause_of_failure = Cause.LOST_PEER


# -- messages


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


# --------------------------------------------------------------------------------------------------------------------
# The watchdog interrupts collectives that will never end, because another rank has left the example.
#
# A rank that waits in gloo or in a TCPStore waits for the sockets of its peers. Cutting its own ends makes every such
# wait fail at once, in any collective, and does no other harm: the groups are replaced afterwards. The cut does not
# reach a rank that waits for something else (sleeps, spins); the parent's timeout covers that.

# Other ranks usually leave the same example by themselves a moment later, and their own outcome says more than an
# interrupted wait.
GRACE = 0.02
# Connections that still have data to read after this time are cut nevertheless.
BUSY = 1.0
# An example that takes longer than this gets a line in the log, which the verdict on a hang shows.
SLOW = 3.0
_TICK = 0.25


class Watchdog:
    """A thread that watches a rank while its main thread is in an example.

    The watchdog of rank 0 decides: shortly after the first rank left the example, it interrupts those that are still in
    it. The watchdogs of the other ranks obey. `peers` are the connections to the other watchdogs.
    """

    def __init__(
        self,
        peers: dict[int, Channel[WatchdogMessage]],
        is_leader: bool,
        connections: Connections,
        deadline: float | None,
    ):
        """Start the thread."""
        self._peers = peers
        self._is_leader = is_leader
        self._deadline = deadline
        self._connections = connections
        self._lock = threading.Lock()
        # The example that the main thread is in.
        self._inside: int | None = None
        self._began = 0.0
        self._reported_slow = False
        self._describe: Callable[[], str] = str
        # The example that some rank left early.
        self._left: int | None = None
        self._left_at = 0.0
        self._interrupted_at = 0.0
        # The last example that was interrupted.
        self.interrupted = -1
        # The last example that began.
        self.current = -1
        self._finished = True
        # The main thread sends, the watchdog receives.
        sending, receiving = socket_pair()
        self._own = Channel[WatchdogMessage](sending, WatchdogMessage)
        received = Channel[WatchdogMessage](receiving, WatchdogMessage)
        self._closing = False
        self._loop = EventLoop()
        for source in (received, *peers.values()):
            self._loop.serve(source, self._on_message, self._on_end)
        self._ends: tuple[Any, ...] = (self._own, received, self._loop)
        self._thread = threading.Thread(target=self._listen, name="watchdog", daemon=True)
        self._thread.start()

    # -- the main thread

    def begin(self, example: int) -> None:
        """Start an example. Call this before any rank enters it: another may have left it before this one enters."""
        with self._lock:
            self.current = example
            self._began = time.monotonic()
            self._finished = False
            self._reported_slow = False

    def enter(self, example: int, describe: Callable[[], str]) -> None:
        with self._lock:
            self._inside, self._describe = example, describe
            if self.interrupted == example:
                # The example was interrupted before this rank entered it.
                self._connections.cut(include_busy=True)

    def leave(self) -> bool:
        """Stop watching the main thread, and return whether the example was interrupted."""
        with self._lock:
            example, self._inside = self._inside, None
            return self.interrupted == example

    def finish(self) -> None:
        """End the example: all ranks are known to have left it."""
        with self._lock:
            self._finished = True

    def seconds_since_interrupt(self, example: int) -> float:
        with self._lock:
            if self.interrupted != example:
                return 0.0
            return time.monotonic() - self._interrupted_at

    def report_left(self, example: int) -> None:
        """Report that this rank left the example early, so that the others do not wait for it."""
        if self._is_leader:
            self._own.send(ExampleLeft(example))
            return
        # Rank 0 is gone, and its end has interrupted all ranks already.
        with suppress(OSError):
            self._peers[0].send(ExampleLeft(example))

    def close(self) -> None:
        self._closing = True
        self._own.send(StopWatching())
        self._thread.join()
        for end in self._ends:
            end.close()

    # -- the watchdog's thread

    def _listen(self) -> None:
        while not self._closing:
            self._loop.step(time.monotonic() + self._seconds_to_wait())
            self._check_times()

    def _seconds_to_wait(self) -> float:
        now = time.monotonic()
        if self._left is not None and self._is_leader:
            return max(0.0, self._left_at + GRACE - now)
        is_recent = now - self._interrupted_at < BUSY
        return GRACE if is_recent and self._is_still_inside() else _TICK

    def _is_still_inside(self) -> bool:
        """Is the main thread still in an example that was interrupted? Its connections may be busy, or be new ones."""
        with self._lock:
            return self._inside is not None and self.interrupted == self._inside

    def _on_message(self, message: WatchdogMessage) -> None:
        if isinstance(message, InterruptExample):
            self._interrupt(message.number)
        elif isinstance(message, ExampleLeft) and (self._left is None or message.number > self._left):
            self._left = message.number
            self._left_at = time.monotonic()

    def _on_end(self) -> None:
        """A rank is gone, so this example is over for all. The main thread detects the loss by itself."""
        if self._is_leader:
            self._on_message(ExampleLeft(self.current))
        else:
            self._on_message(InterruptExample(self.current))

    def _check_times(self) -> None:
        """Interrupt what is due, and report an example that is slow."""
        now = time.monotonic()
        if self._is_leader and self._left is not None and now >= self._left_at + GRACE:
            self._interrupt_all(self._left)
            self._left = None
        if self._is_still_inside():
            self._interrupt(self.current)
        with self._lock:
            running, took = self.current, now - self._began
            is_late = not self._finished and self._deadline is not None and took > self._deadline
            is_slow = self._inside is not None and took > SLOW and not self._reported_slow
        if is_late and self._is_leader and self.interrupted < running:
            self._interrupt_all(running)
        if is_slow:
            self._reported_slow = True
            print(f"this example has been running for {took:.0f} s: {self._describe()}", file=sys.stderr, flush=True)

    def _interrupt_all(self, example: int) -> None:
        """Rank 0: interrupt every rank that is still in the example."""
        with self._lock:
            over = self._finished or self.current != example
        if over:
            return
        for peer in self._peers.values():
            with suppress(OSError):
                peer.send(InterruptExample(example))
        self._interrupt(example)

    def _interrupt(self, example: int) -> None:
        with self._lock:
            if example < self.current:
                return
            if self.interrupted != example:
                self.interrupted = example
                self._interrupted_at = time.monotonic()
            # Members of a new group connect to each other: one that is cut off leaves others waiting for a connection,
            # which no cut ends. The creation ends by itself, and what follows is cut.
            if self._inside == example and flight_recorder.group_in_creation() is None:
                is_overdue = time.monotonic() - self._interrupted_at > BUSY
                self._connections.cut(include_busy=is_overdue)
