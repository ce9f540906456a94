"""Annotations that GitHub shows beside the source, when the run is one of its workflows'."""

from __future__ import annotations

from dataclasses import dataclass

from ..events import Event, RunEnded
from ..model import FinishedTest
from . import text
from .terminal import LineWriter

# GitHub shows that many of a step; the rest would only be lines in the log.
MOST = 10


@dataclass
class GitHub:
    page: LineWriter

    def on_event(self, event: Event) -> None:
        if isinstance(event, RunEnded):
            self.page.write("".join(map(annotation, event.summary.failures[:MOST])))


def annotation(one: FinishedTest) -> str:
    test = one.test
    facts = {"file": test.id.file, "line": str(test.line or 1), "title": f"{one.outcome.value}: {test.id}"}
    where = ",".join(f"{name}={_escape(value, inside=',:')}" for name, value in facts.items())
    return f"::error {where}::{_escape(text.printable(one.last.message).strip() or one.outcome.value)}\n"


def _escape(words: str, inside: str = "") -> str:
    return "".join(f"%{ord(letter):02X}" if letter in "%\r\n" + inside else letter for letter in words)
