"""The watchdog, which interrupts collectives that will never end because another rank has left the example.

A rank that waits in gloo or in a TCPStore waits for the sockets of its peers. Cutting its own ends makes every such
wait fail at once, in any collective, and does no other harm: the groups are replaced afterwards. The cut does not reach
a rank that waits for something else (sleeps, spins); the parent's timeout covers that.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch_testing_ext._process.channels import Channel, socket_pair
from torch_testing_ext._process.event_loop import EventLoop
from torch_testing_ext._torch.groups import made_groups

from .groups_of_examples import Connections
from .links import ExampleLeft, InterruptExample, StopWatching, WatchdogMessage

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
        """Whether the main thread is still in an interrupted example. Its connections may be busy, or be new ones."""
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
            if self._inside == example and made_groups.group_in_creation() is None:
                is_overdue = time.monotonic() - self._interrupted_at > BUSY
                self._connections.cut(include_busy=is_overdue)
