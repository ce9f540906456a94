"""The last line of a terminal while files are imported, where rich is not installed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch_testing_ext._process.logs import cut

from ..events import Event, Importing
from . import text
from .terminal import LineWriter

_CLEAR = "\r\x1b[K"


def importing(event: Importing) -> str:
    """The files that are being imported, in words."""
    if not event.files:
        return f"importing torch, then {text.count(event.total, 'file')}"
    names = ", ".join(text.printable(name.rpartition("/")[2]) for name in event.files)
    return f"importing {event.total - event.left + 1}/{event.total}: {names}"


@dataclass
class StatusLine:
    """Draws the line. It is also a writer: text that is written to it scrolls by above the line."""

    terminal: LineWriter
    columns: Callable[[], int | None]
    _line: str = ""

    def write(self, lines: str) -> None:
        self.terminal.write(f"{_CLEAR if self._line else ''}{lines}{self._line}")

    def on_event(self, event: Event) -> None:
        before = self._line
        self._line = cut(importing(event), (self.columns() or 80) - 1) if isinstance(event, Importing) else ""
        if before != self._line:
            self.terminal.write(f"{_CLEAR}{self._line}")
