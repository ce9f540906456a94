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
        summary = event.summary
        groups = brief.by_cause(summary.failures, summary.policy)
        annotations = [annotation(group, summary.policy) for group in groups[:MOST_ANNOTATIONS]]
        self.writer.write("".join(annotations))
        if self.step_summary is not None:
            with suppress(OSError), self.step_summary.open("a", encoding="utf-8") as file:
                file.write(step_summary(summary, groups))


def annotation(group: Sequence[FinishedTest], policy: Policy) -> str:
    """The workflow command that creates the annotation of failures with one cause, at the line of the culprit."""
    first = group[0]
    attempt = brief.failing_attempts(first, policy)[-1]
    message = text.screen(attempt).strip()
    facts = {
        "file": first.test.id.file,
        "line": str(_line(attempt) or first.test.line or 1),
        "title": brief.heading(group) or f"{first.outcome.value}: {first.test.id}",
    }
    where = ",".join(f"{name}={_escape(value, inside=',:')}" for name, value in facts.items())
    shown = cut_middle(message, LONGEST_ANNOTATION) or first.outcome.value
    return f"::error {where}::{_escape(shown)}\n"


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
        heading = brief.heading(group) or text.test_name(group[0].test.id)
        title = html.escape(heading, quote=False)
        cause = html.escape(text.reason(attempt), quote=False)
        names = ""
        if len(group) > 1:
            names = "".join(f"- `{text.test_name(result.test.id)}`\n" for result in group)
        message = text.screen(attempt).replace("```", "~~~")
        parts.append(
            f"<details><summary><b>{title}</b>: {cause}</summary>\n\n{names}\n```\n{message}\n```\n</details>\n"
        )
    return cut_middle("\n".join(parts), LONGEST_SUMMARY) + "\n"


def _escape(words: str, inside: str = "") -> str:
    special = "%\r\n" + inside
    escaped = ""
    for letter in words:
        escaped += f"%{ord(letter):02X}" if letter in special else letter
    return escaped
