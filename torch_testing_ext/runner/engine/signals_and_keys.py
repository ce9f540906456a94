"""A user's input during a run: Ctrl-C, SIGTERM, SIGUSR1, and a key on the terminal."""

from __future__ import annotations

import os
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from types import FrameType
from typing import Any

from torch_testing_ext._process.event_loop import EventLoop, wait_readable
from torch_testing_ext._process.signals import SignalReader

REASONS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP (the terminal was closed)"}
KEY = b"t"


def interrupting() -> list[signal.Signals]:
    """The signals that interrupt a run: not those that are ignored, as under nohup or in the background of a shell."""
    return [number for number in REASONS if signal.getsignal(number) is not signal.SIG_IGN]


class Deferred:
    """Notes a signal that would interrupt, instead of raising KeyboardInterrupt; the second one raises it."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Deferred:
        self._handlers = {number: signal.signal(number, self._handle) for number in interrupting()}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.reason is not None:
            raise KeyboardInterrupt
        self.reason = REASONS[signal.Signals(number)]


@contextmanager
def signals_and_keys(
    loop: EventLoop,
    interrupt: Callable[[str], object],
    ask: Callable[[], object],
    with_keys: bool = True,
) -> Iterator[None]:
    """Deliver signals and keys through the loop, so that they do not interrupt other code."""
    with ExitStack() as owner:
        reader = owner.enter_context(closing(SignalReader((*interrupting(), signal.SIGUSR1))))

        def on_signals() -> None:
            for number in reader.read():
                if number in REASONS:
                    interrupt(REASONS[signal.Signals(number)])
                else:
                    ask()

        loop.listen(reader, on_signals)
        owner.callback(loop.forget, reader)
        terminal = owner.enter_context(keys()) if with_keys else None
        if terminal is not None:

            def on_key() -> None:
                if KEY in _read(loop, terminal):
                    ask()

            loop.listen(terminal, on_key)
            owner.callback(loop.forget, terminal)
        yield


@contextmanager
def keys() -> Iterator[int | None]:
    """The terminal in character mode, if this process is in its foreground; else None."""
    fd = _foreground_terminal()
    if fd is None:
        yield None
        return
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd, termios.TCSANOW)
    try:
        yield fd
    finally:
        with suppress(termios.error):
            termios.tcsetattr(fd, termios.TCSANOW, before)


def _foreground_terminal() -> int | None:
    try:
        fd = sys.stdin.fileno()
        if os.isatty(fd) and os.tcgetpgrp(fd) == os.getpgrp():
            return fd
    except (OSError, ValueError, AttributeError):
        # There is no stdin, it is closed, or it has no process group.
        pass
    return None


def _read(loop: EventLoop, terminal: int) -> bytes:
    keys = os.read(terminal, 64) if wait_readable(terminal, time.monotonic()) else b""
    if not keys:
        # The terminal was closed.
        loop.forget(terminal)
    return keys
