"""Annotations that GitHub shows next to the source, for runs in a GitHub workflow."""

from __future__ import annotations

from dataclasses import dataclass

from torch_testing_ext._process.logs import cut_middle

from ..events import Event, RunEnded
from ..model import FinishedTest
from . import text
from .terminal import LineWriter

# GitHub shows at most this many per step.
MOST = 10
# Characters of a message. An annotation is printed on the console first.
LONGEST_MESSAGE = 4_000


@dataclass
class GitHub:
    """Writes an annotation for each failure."""

    writer: LineWriter

    def on_event(self, event: Event) -> None:
        if isinstance(event, RunEnded):
            self.writer.write("".join(map(annotation, event.summary.failures[:MOST])))


def annotation(one: FinishedTest) -> str:
    """The workflow command that creates the annotation of a failure."""
    test = one.test
    facts = {"file": test.id.file, "line": str(test.line or 1), "title": f"{one.outcome.value}: {test.id}"}
    where = ",".join(f"{name}={_escape(value, inside=',:')}" for name, value in facts.items())
    message = cut_middle(text.printable(one.last.message).strip(), LONGEST_MESSAGE)
    return f"::error {where}::{_escape(message or one.outcome.value)}\n"


def _escape(words: str, inside: str = "") -> str:
    return "".join(f"%{ord(letter):02X}" if letter in "%\r\n" + inside else letter for letter in words)
