"""What the user can say while a run goes on: Ctrl-C, SIGTERM, SIGUSR1, and a key on the terminal."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any

from torch_testing_ext._process.loop import Loop

REASONS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
KEY = b"t"


@contextmanager
def attention(loop: Loop, interrupt: Callable[[str], object], ask: Callable[[], object]) -> Iterator[None]:
    """Signals and keys come through the loop: nothing is interrupted in the middle."""

    def hear(reading: int) -> None:
        for number in os.read(reading, 4096):
            if number in REASONS:
                interrupt(REASONS[signal.Signals(number)])
            elif number == signal.SIGUSR1:
                ask()

    with ExitStack() as owner:
        reading = owner.enter_context(_signals((*REASONS, signal.SIGUSR1)))
        loop.listen(reading, lambda: hear(reading))
        owner.callback(loop.forget, reading)
        terminal = owner.enter_context(_keys())
        if terminal is not None:
            loop.listen(terminal, lambda: KEY in _read(loop, terminal) and ask())
            owner.callback(loop.forget, terminal)
        yield


@contextmanager
def _signals(numbers: tuple[signal.Signals, ...]) -> Iterator[int]:
    """A descriptor from which to read the numbers of these signals as they come."""
    reading, writing = os.pipe()
    for fd in (reading, writing):
        os.set_blocking(fd, False)
    before: dict[signal.Signals, Any] = {number: signal.signal(number, _ignore) for number in numbers}
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield reading
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reading)
        os.close(writing)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Handled in the loop."""


@contextmanager
def _keys() -> Iterator[int | None]:
    """The terminal, told to give keys one by one, if we are on one and in its foreground."""
    fd = _foreground_terminal()
    if fd is None:
        yield None
        return
    import termios
    import tty

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
        return fd if os.isatty(fd) and os.tcgetpgrp(fd) == os.getpgrp() else None
    except (OSError, ValueError, AttributeError):
        return None


def _read(loop: Loop, terminal: int) -> bytes:
    keys = os.read(terminal, 64) if select.select([terminal], [], [], 0)[0] else b""
    if not keys:
        loop.forget(terminal)  # it has hung up
    return keys
