"""The stream that a console report is written to, and the colours on it."""

from __future__ import annotations

import enum
import sys
from collections.abc import Mapping
from typing import Protocol, TextIO

from ..model import Outcome


class Page(Protocol):
    """Takes whole lines."""

    def write(self, text: str) -> None: ...


class Paper:
    """A stream that may break (a closed pipe, a full disk): the run then goes on without it."""

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
        if not isinstance(error, BrokenPipeError):  # whoever closed the pipe knows
            print(f"run_test.py: the console report ends here: {error}", file=sys.stderr)


class Ink(enum.Enum):
    GREEN = "32"
    RED = "31;1"
    YELLOW = "33"
    FAINT = "2"
    BOLD = "1"


INK_OF = {
    Outcome.PASSED: Ink.GREEN,
    Outcome.FAILED: Ink.RED,
    Outcome.ERROR: Ink.RED,
    Outcome.TIMEOUT: Ink.RED,
    Outcome.CRASHED: Ink.RED,
    Outcome.LEAKED: Ink.YELLOW,
    Outcome.FLAKY: Ink.YELLOW,
    Outcome.SKIPPED: Ink.FAINT,
    Outcome.EXPECTED_FAILURE: Ink.GREEN,
    Outcome.UNEXPECTED_SUCCESS: Ink.RED,
}


class Pencil:
    """Writes in colour, where colour is wanted."""

    def __init__(self, coloured: bool):
        self._coloured = coloured

    def __call__(self, ink: Ink, text: str) -> str:
        return f"\x1b[{ink.value}m{text}\x1b[0m" if self._coloured else text


def pencil(stream: TextIO, environ: Mapping[str, str]) -> Pencil:
    """Colours on terminals and where somebody asks for them (FORCE_COLOR), unless somebody asks for none (NO_COLOR)."""
    if environ.get("NO_COLOR"):
        return Pencil(coloured=False)
    return Pencil(bool(environ.get("FORCE_COLOR")) or is_terminal(stream, environ))


def is_terminal(stream: TextIO, environ: Mapping[str, str]) -> bool:
    return stream.isatty() and environ.get("TERM", "dumb") != "dumb"
