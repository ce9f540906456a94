"""The stream of the console report, and the colours on it."""

from __future__ import annotations

import enum
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol, TextIO

from ..model import TestOutcome


class LineWriter(Protocol):
    """Accepts whole lines of text."""

    def write(self, text: str) -> object: ...


class TerminalStream:
    """A stream that may break (a closed pipe, a full disk), after which the run continues without it.

    It has the methods of a stream, so that other libraries can write to it, too.
    """

    def __init__(self, stream: TextIO):
        self.stream = stream
        self._broken = False

    def write(self, text: str) -> int:
        if not self._broken:
            try:
                self.stream.write(self._encodable(text))
                self.stream.flush()
            except (OSError, ValueError) as error:  # ValueError: it is closed
                self._give_up(error)
        return len(text)

    def flush(self) -> None:
        """Does nothing: all that is written is flushed."""

    def isatty(self) -> bool:
        return self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()

    @property
    def encoding(self) -> str:
        return self.stream.encoding or "utf-8"

    def _encodable(self, text: str) -> str:
        return text.encode(self.encoding, "backslashreplace").decode(self.encoding)

    def _give_up(self, error: Exception) -> None:
        self._broken = True
        discard(self.stream)
        if not isinstance(error, BrokenPipeError):  # the reader closed the pipe on purpose
            with suppress(OSError, ValueError):  # stderr may be broken, too
                print(f"run_test.py: console output stops here: {error}", file=sys.stderr)


def discard(stream: TextIO) -> None:
    """Let a stream that is broken end in /dev/null, with the text in its buffer: Python flushes it at its exit."""
    with suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


class Style(enum.Enum):
    """Text styles, as ANSI codes."""

    GREEN = "32"
    RED = "31;1"
    YELLOW = "33"
    FAINT = "2"
    BOLD = "1"


STYLE_OF = {
    TestOutcome.PASSED: Style.GREEN,
    TestOutcome.FAILED: Style.RED,
    TestOutcome.ERROR: Style.RED,
    TestOutcome.TIMEOUT: Style.RED,
    TestOutcome.CRASHED: Style.RED,
    TestOutcome.LEAKED: Style.YELLOW,
    TestOutcome.FLAKY: Style.YELLOW,
    TestOutcome.SKIPPED: Style.FAINT,
    TestOutcome.EXPECTED_FAILURE: Style.GREEN,
    TestOutcome.UNEXPECTED_SUCCESS: Style.RED,
}


class Styler:
    """Applies styles to text, if colours are on."""

    def __init__(self, coloured: bool):
        self._coloured = coloured

    def __call__(self, style: Style, text: str) -> str:
        return f"\x1b[{style.value}m{text}\x1b[0m" if self._coloured else text


def make_styler(stream: TextIO, environ: Mapping[str, str]) -> Styler:
    """Uses colours on terminals and with FORCE_COLOR, but never with NO_COLOR."""
    if environ.get("NO_COLOR"):
        return Styler(coloured=False)
    return Styler(bool(environ.get("FORCE_COLOR")) or is_terminal(stream, environ))


def columns(stream: TextIO, environ: Mapping[str, str]) -> int | None:
    """The width of the terminal that shows a stream, now; None if there is none. As usual, COLUMNS overrides it."""
    chosen = environ.get("COLUMNS", "")
    if chosen.isascii() and chosen.isdigit() and int(chosen):
        return int(chosen)
    if not is_terminal(stream, environ):
        return None
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):  # a stream without a descriptor
        return None


def is_terminal(stream: TextIO, environ: Mapping[str, str]) -> bool:
    return stream.isatty() and environ.get("TERM", "dumb") != "dumb"
