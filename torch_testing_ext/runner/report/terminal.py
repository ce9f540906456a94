"""The stream of the console report, and the colours on it."""

from __future__ import annotations

import enum
import os
import sys
from collections.abc import Mapping
from typing import Protocol, TextIO

from ..model import TestOutcome


class LineWriter(Protocol):
    """Accepts whole lines of text."""

    def write(self, text: str) -> None: ...


class TerminalStream:
    """A stream that may break (a closed pipe, a full disk), after which the run continues without it."""

    def __init__(self, stream: TextIO):
        self.stream = stream
        self._broken = False

    def write(self, text: str) -> None:
        if self._broken:
            return
        try:
            self.stream.write(self._encodable(text))
            self.stream.flush()
        except OSError as error:
            self._give_up(error)

    def _encodable(self, text: str) -> str:
        encoding = self.stream.encoding or "utf-8"
        return text.encode(encoding, "backslashreplace").decode(encoding)

    def _give_up(self, error: OSError) -> None:
        self._broken = True
        if not isinstance(error, BrokenPipeError):  # the reader closed the pipe on purpose
            print(f"run_test.py: console output stops here: {error}", file=sys.stderr)


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
