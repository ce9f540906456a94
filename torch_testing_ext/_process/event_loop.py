"""The event loop."""

import selectors
import signal
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from . import system
from .signals import SignalReader, unblock

# Not epoll: a forked child would share it with its parent.
_Selector = selectors.PollSelector
# Seconds of one wait: poll takes milliseconds of 31 bits.
_LONGEST_WAIT = 1e6


class Timer:
    """A call that is due at a time of the loop's clock, unless it is cancelled before."""

    def __init__(self, at: float, call: Callable[[], object]):
        self.at = at
        self.call = call
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class EventLoop:
    """Calls back when a descriptor becomes readable or a timer is due, one callback at a time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self._selector = _Selector()
        self._timers: list[Timer] = []
        self._idle: deque[Callable[[], object]] = deque()

    def listen(self, source: Any, call: Callable[[], object]) -> None:
        """Call whenever `source`, a descriptor or an object with a fileno(), is readable."""
        self._selector.register(source, selectors.EVENT_READ, call)

    def serve(self, channel: Any, on_message: Callable[[Any], object], on_end: Callable[[], object]) -> None:
        """Call with each message that a channel receives; at its end, stop listening to it and call `on_end`."""

        def receive() -> None:
            try:
                received = channel.receive()
            except (EOFError, OSError):
                self.forget(channel)
                on_end()
                return
            for message in received:
                on_message(message)

        self.listen(channel, receive)

    def forget(self, source: Any) -> None:
        """Stop listening to `source`, if this loop listens to it."""
        with suppress(KeyError, ValueError):
            self._selector.unregister(source)

    def at(self, moment: float, call: Callable[[], object]) -> Timer:
        """Call once when the clock has reached `moment`."""
        timer = Timer(moment, call)
        self._timers.append(timer)
        return timer

    def after(self, seconds: float, call: Callable[[], object]) -> Timer:
        """Call once when that many seconds have passed."""
        return self.at(self.clock() + seconds, call)

    def when_idle(self, call: Callable[[], object]) -> None:
        """Call once when nothing else is to be done; in the order of the requests, one at a time."""
        self._idle.append(call)

    def drop_idle(self) -> None:
        self._idle.clear()

    def step(self, until: float | None = None) -> bool:
        """Wait for the next event and call back. Returns False if the time `until` came first."""
        happened = self._call_readable(self._seconds_until(until))
        happened = self._call_due_timers() or happened
        if not happened and self._idle:
            call = self._idle.popleft()
            call()
            return True
        return happened

    def _call_readable(self, seconds: float | None) -> bool:
        """Wait so long for sources that are readable, and call back. Returns whether there were any."""
        ready = self.wait(seconds)
        for key, _ in ready:
            # A callback before this one may have stopped listening to the descriptor.
            if self._selector.get_map().get(key.fd) is key:
                key.data()
        return bool(ready)

    def wait(self, seconds: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait so long for sources that are readable, or without an end, and return them."""
        return self._selector.select(seconds)

    def _seconds_until(self, until: float | None) -> float | None:
        if self._idle:
            return 0.0
        self._timers = [timer for timer in self._timers if not timer.cancelled]
        moments = [timer.at for timer in self._timers]
        if until is not None:
            moments.append(until)
        if not moments:
            return None
        seconds = min(moments) - self.clock()
        return min(max(0.0, seconds), _LONGEST_WAIT)

    def _call_due_timers(self) -> bool:
        now = self.clock()
        due = [timer for timer in self._timers if timer.at <= now and not timer.cancelled]
        if due:
            # What has come in time counts, however long the callbacks before have taken: it may cancel a timer.
            self._call_readable(0.0)
        for timer in sorted(due, key=lambda timer: timer.at):
            # A callback may have cancelled it, or have waited in this loop itself.
            if not timer.cancelled and timer in self._timers:
                self._timers.remove(timer)
                timer.call()
        return bool(due)

    def close(self) -> None:
        self._selector.close()


def wait_readable(source: Any, until: float | None = None) -> bool:
    """Wait until one descriptor is readable. Returns False if the time `until` came first."""
    with _Selector() as selector:
        selector.register(source, selectors.EVENT_READ)
        seconds = None if until is None else max(0.0, until - time.monotonic())
        return bool(selector.select(seconds))


class ParentLoop(EventLoop):
    """Calls back when children have ended, and stops at SIGTERM. Ctrl-C is for the process that has the terminal."""

    def __init__(self, on_children_ended: Callable[[], object] = lambda: None):
        super().__init__()
        self.running = False
        self.on_children_ended = on_children_ended
        self._signals = SignalReader((signal.SIGCHLD, signal.SIGTERM))
        self.listen(self._signals, self._on_signals)

    def run(self) -> None:
        """Run until `stop` is called or SIGTERM arrives."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # A child may be asked where it is before it has a handler for that: the question must not kill it.
        signal.signal(system.DUMP_STACKS, signal.SIG_IGN)
        signal.signal(system.DUMP_STACKS_NOW, signal.SIG_IGN)
        unblock()
        self.running = True
        while self.running:
            self.step()

    def stop(self) -> None:
        self.running = False

    def abandon(self) -> None:
        """In a forked child, which has no use for the signals of its parent."""
        self._signals.abandon()

    def _on_signals(self) -> None:
        if signal.SIGTERM in self._signals.read():
            self.stop()
        else:
            self.on_children_ended()
