"""Getting ranks out of collectives that will never end, because another rank has left the example.

A rank that waits in gloo or in a TCPStore waits for its peers' sockets. Cutting its own ends makes every such wait
fail at once, whatever collective it is in, and harms nothing else: the groups are made anew afterwards. A rank that
waits for something else (sleeps, spins) is not reached; the parent's time-out is there for that.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait

from .connections import Connections

# Others mostly leave the same example by themselves, a moment later: what they say of it is worth more than a wait.
GRACE = 0.02
# Connections that still have something to read after so long are cut all the same.
BUSY = 1.0
# What has made no progress for so long is worth a line in the log, which the verdict on a hang shows.
SLOW = 3.0
_TICK = 0.25


class Watchdog:
    """A thread that listens to the alarm connections while the main thread is in an example.

    Rank 0's decides: a moment after the first rank left the example, those still in it are woken. The others' obey.
    """

    def __init__(self, alarms: dict[int, Connection], is_leader: bool, wires: Connections, deadline: float | None):
        self._alarms = dict(alarms)
        self._is_leader = is_leader
        self._deadline = deadline
        self._wires = wires
        self._lock = threading.Lock()
        self._inside: int | None = None  # the example that the main thread is in
        self._began = 0.0
        self._told_slow = False
        self._describe: Callable[[], str] = str
        self._left: int | None = None  # the example that somebody left early
        self._left_at = 0.0
        self._woken_at = 0.0
        self.woken = -1  # the last example that was broken off
        self.current = -1  # the last example that began
        self._settled = True
        self._bell, self._bell_end = Pipe(duplex=False)
        self._closing = False
        self._thread = threading.Thread(target=self._listen, name="lockstep", daemon=True)
        self._thread.start()

    # -- the main thread

    def begin(self, example: int) -> None:
        """Before any rank hears of it: one may have left it when this one comes to enter it."""
        with self._lock:
            self.current, self._began = example, time.monotonic()
            self._settled = self._told_slow = False

    def enter(self, example: int, describe: Callable[[], str]) -> None:
        with self._lock:
            self._inside, self._describe = example, describe
            if self.woken == example:
                self._wires.cut(busy_ones=True)  # it was over before this rank came to it

    def leave(self) -> bool:
        """Returns whether it was broken off."""
        with self._lock:
            example, self._inside = self._inside, None
            return self.woken == example

    def settled(self) -> None:
        """All ranks are known to be out of the example."""
        with self._lock:
            self._settled = True

    def seconds_since_woken(self, example: int) -> float:
        """0 while the example has not been broken off."""
        with self._lock:
            return time.monotonic() - self._woken_at if self.woken == example else 0.0

    def alarm(self, example: int) -> None:
        """This rank left the example early: see that the others do not wait for it."""
        if self._is_leader:
            self._bell_end.send(("left", example))
            return
        with suppress(KeyError, OSError):  # rank 0 is gone: then everybody is woken already
            self._alarms[0].send(("left", example))

    def close(self) -> None:
        self._closing = True
        with suppress(OSError):
            self._bell_end.send(("close", -1))
        self._thread.join()
        self._bell.close()
        self._bell_end.close()

    # -- the thread

    def _listen(self) -> None:
        while not self._closing:
            for news in wait([self._bell, *self._alarms.values()], self._patience()):
                self._take(news)  # type: ignore[arg-type]
            self._look_at_clock()

    def _patience(self) -> float:
        if self._left is not None and self._is_leader:
            return max(0.0, self._left_at + GRACE - time.monotonic())
        return GRACE if self._is_held_up() and time.monotonic() - self._woken_at < BUSY else _TICK

    def _is_held_up(self) -> bool:
        """Is the main thread still in what was broken off? It may have busy connections, or have gone on to others."""
        with self._lock:
            return self._inside is not None and self.woken == self._inside

    def _take(self, source: Connection) -> None:
        try:
            what, example = source.recv()
        except (EOFError, OSError):
            # That rank is gone: this example is over, for all. The main thread finds out for itself.
            self._alarms = {rank: alarm for rank, alarm in self._alarms.items() if alarm is not source}
            what, example = ("left" if self._is_leader else "wake"), self.current
        if what == "wake":
            self._wake(example)
        elif what == "left":
            self._note_left(example)

    def _note_left(self, example: int) -> None:
        if self._left is None or example > self._left:
            self._left, self._left_at = example, time.monotonic()

    def _look_at_clock(self) -> None:
        now = time.monotonic()
        if self._is_leader and self._left is not None and now >= self._left_at + GRACE:
            self._break_off(self._left)
            self._left = None
        if self._is_held_up():
            self._wake(self.current)
        with self._lock:
            running, took = self.current, now - self._began
            is_late = not self._settled and self._deadline is not None and took > self._deadline
            is_slow = self._inside is not None and took > SLOW and not self._told_slow
        if is_late and self._is_leader and self.woken < running:
            self._break_off(running)
        if is_slow:
            self._told_slow = True
            print(f"for {took:.0f} s now in this example: {self._describe()}", file=sys.stderr, flush=True)

    def _break_off(self, example: int) -> None:
        """Rank 0: wake everybody who is in the example still."""
        with self._lock:
            over = self._settled or self.current != example
        if over:
            return
        for alarm in self._alarms.values():
            with suppress(OSError):
                alarm.send(("wake", example))
        self._wake(example)

    def _wake(self, example: int) -> None:
        with self._lock:
            if example < self.current:
                return
            if self.woken != example:
                self.woken, self._woken_at = example, time.monotonic()
            if self._inside == example:
                self._wires.cut(busy_ones=time.monotonic() - self._woken_at > BUSY)
