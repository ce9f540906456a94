"""The event loop of a process that forks others."""

from __future__ import annotations

import signal
from collections.abc import Callable

from . import signals, system
from .loop import EventLoop
from .signals import SignalReader


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
        signals.unblock()
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
