"""The failures of a run in a workflow of GitHub: annotations next to the source, and the summary of the step."""

from __future__ import annotations

import html
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from torch_testing_ext._process.logs import cut_middle

from ..events import Event, RunEnded
from ..model import Attempt, FinishedTest, Policy, Summary
from . import brief, text
from .terminal import LineWriter

# GitHub shows at most this many per step.
MOST_ANNOTATIONS = 10
# Characters of a message, and of the summary of a step, of which GitHub takes a MiB.
LONGEST_ANNOTATION = 4_000
LONGEST_SUMMARY = 500_000


@dataclass
class GitHub:
    """Writes an annotation for each cause of failures, and appends to the file with the summary of the step."""

    writer: LineWriter
    step_summary: Path | None = None

    def on_event(self, event: Event) -> None:
        if not isinstance(event, RunEnded):
            return
        groups = brief.by_cause(event.summary.failures, event.summary.policy)
        self.writer.write("".join(annotation(group, event.summary.policy) for group in groups[:MOST_ANNOTATIONS]))
        if self.step_summary is not None:
            with suppress(OSError), self.step_summary.open("a", encoding="utf-8") as file:
                file.write(step_summary(event.summary, groups))


def annotation(group: Sequence[FinishedTest], policy: Policy) -> str:
    """The workflow command that creates the annotation of failures with one cause, at the line of the culprit."""
    one = group[0]
    attempt = brief.failing_attempts(one, policy)[-1]
    said = text.screen(attempt).strip()
    title = brief.heading(group) or f"{one.outcome.value}: {one.test.id}"
    facts = {"file": one.test.id.file, "line": str(_line(attempt) or one.test.line or 1), "title": title}
    where = ",".join(f"{name}={_escape(value, inside=',:')}" for name, value in facts.items())
    return f"::error {where}::{_escape(cut_middle(said, LONGEST_ANNOTATION) or one.outcome.value)}\n"


def _line(attempt: Attempt) -> int | None:
    """The line of the test's file where it failed, the culprit's first."""
    name = PurePosixPath(attempt.test.id.file).name
    sites = [row.site for row in attempt.failure.rows if row.site is not None] if attempt.failure is not None else []
    return next((site.line for site in sites if PurePosixPath(site.file).name == name), None)


def step_summary(summary: Summary, groups: Sequence[Sequence[FinishedTest]]) -> str:
    """The run in Markdown: the counts, and each cause of failures with its tests."""
    parts = [f"### {summary.last_line} in {text.duration(summary.seconds)}\n"]
    for group in groups:
        attempt = brief.failing_attempts(group[0], summary.policy)[-1]
        title = brief.heading(group) or text.test_name(group[0].test.id)
        names = "".join(f"- `{text.test_name(one.test.id)}`\n" for one in group) if len(group) > 1 else ""
        title, cause = (html.escape(words, quote=False) for words in (title, text.reason(attempt)))
        said = text.screen(attempt).replace("```", "~~~")
        parts.append(f"<details><summary><b>{title}</b>: {cause}</summary>\n\n{names}\n```\n{said}\n```\n</details>\n")
    return cut_middle("\n".join(parts), LONGEST_SUMMARY) + "\n"


def _escape(words: str, inside: str = "") -> str:
    return "".join(f"%{ord(letter):02X}" if letter in "%\r\n" + inside else letter for letter in words)
