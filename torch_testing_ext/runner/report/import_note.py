"""The files that are being imported, in words."""

from __future__ import annotations

from dataclasses import dataclass

from torch_testing_ext._process.words import count
from torch_testing_ext.runner.events import Event, Importing

from .terminal_stream import LineWriter
from .wording import printable


def importing(event: Importing) -> str:
    """The files that are being imported, in words."""
    if not event.files:
        return f"importing torch, then {count(event.total, 'file')}"
    names = ", ".join(printable(name.rpartition("/")[2]) for name in event.files)
    return f"importing {event.total - event.left + 1}/{event.total}: {names}"


@dataclass
class ImportNote:
    """Says once that files are imported, on a terminal without a live display. It is also a writer."""

    terminal: LineWriter
    _has_begun: bool = False

    def write(self, lines: str) -> None:
        self.terminal.write(lines)

    def on_event(self, event: Event) -> None:
        if isinstance(event, Importing) and not self._has_begun:
            self._has_begun = True
            self.terminal.write(f"{importing(event)}\n")
