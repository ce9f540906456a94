"""One event loop: descriptors that become readable, and moments that come."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class Timer:
    def __init__(self, at: float, call: Callable[[], object]):
        self.at = at
        self.call = call
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Loop:
    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[Timer] = []

    def listen(self, source: Any, call: Callable[[], object]) -> None:
        self._selector.register(source, selectors.EVENT_READ, call)

    def forget(self, source: Any) -> None:
        """Listen no more, if we did."""
        with suppress(KeyError, ValueError):
            self._selector.unregister(source)

    def at(self, moment: float, call: Callable[[], object]) -> Timer:
        """Call once when time.monotonic() has come to `moment`."""
        timer = Timer(moment, call)
        self._timers.append(timer)
        return timer

    def after(self, seconds: float, call: Callable[[], object]) -> Timer:
        return self.at(time.monotonic() + seconds, call)

    def step(self) -> None:
        """Wait for the next thing to happen, and do what is to be done then."""
        for key, _ in self._selector.select(self._time_left()):
            # Who was called before may have stopped listening to this one.
            if self._selector.get_map().get(key.fd) is key:
                key.data()
        self._ring()

    def _time_left(self) -> float | None:
        self._timers = [timer for timer in self._timers if not timer.cancelled]
        first = min((timer.at for timer in self._timers), default=None)
        return None if first is None else max(0.0, first - time.monotonic())

    def _ring(self) -> None:
        now = time.monotonic()
        due = [timer for timer in self._timers if timer.at <= now]
        self._timers = [timer for timer in self._timers if timer.at > now]
        for timer in sorted(due, key=lambda timer: timer.at):
            if not timer.cancelled:
                timer.call()

    def close(self) -> None:
        self._selector.close()
