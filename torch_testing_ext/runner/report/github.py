"""The failures of a run in a workflow of GitHub."""

from __future__ import annotations

import html
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from torch_testing_ext._process.logs import cut_middle
from torch_testing_ext.runner.events import Event, RunEnded
from torch_testing_ext.runner.model import Attempt, FinishedTest, Policy, Summary

from . import wording
from .brief_failures import by_cause, failing_attempts, heading_of_group
from .terminal_stream import LineWriter

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
        groups = by_cause(summary.failures, summary.policy)
        annotations = [annotation(group, summary.policy) for group in groups[:MOST_ANNOTATIONS]]
        self.writer.write("".join(annotations))
        if self.step_summary is not None:
            with suppress(OSError), self.step_summary.open("a", encoding="utf-8") as file:
                file.write(step_summary(summary, groups))


def annotation(group: Sequence[FinishedTest], policy: Policy) -> str:
    """The workflow command that creates the annotation of failures with one cause, at the line of the culprit."""
    first = group[0]
    attempt = failing_attempts(first, policy)[-1]
    message = wording.screen(attempt).strip()
    facts = {
        "file": first.test.id.file,
        "line": str(_line(attempt) or first.test.line or 1),
        "title": heading_of_group(group) or f"{first.outcome.value}: {first.test.id}",
    }
    where = ",".join(f"{name}={_escape(value, inside=',:')}" for name, value in facts.items())
    shown = cut_middle(message, LONGEST_ANNOTATION) or first.outcome.value
    return f"::error {where}::{_escape(shown)}\n"


def _line(attempt: Attempt) -> int | None:
    """The line of the test's file where it failed, the culprit's first."""
    name = PurePosixPath(attempt.test.id.file).name
    if attempt.failure is None:
        return None
    for row in attempt.failure.rows:
        if row.site is not None and PurePosixPath(row.site.file).name == name:
            return row.site.line
    return None


def step_summary(summary: Summary, groups: Sequence[Sequence[FinishedTest]]) -> str:
    """The run in Markdown: the counts, and each cause of failures with its tests."""
    parts = [f"### {summary.last_line} in {wording.duration(summary.seconds)}\n"]
    for group in groups:
        attempt = failing_attempts(group[0], summary.policy)[-1]
        heading = heading_of_group(group) or wording.test_name(group[0].test.id)
        title = html.escape(heading, quote=False)
        cause = html.escape(wording.reason(attempt), quote=False)
        names = ""
        if len(group) > 1:
            names = "".join(f"- `{wording.test_name(result.test.id)}`\n" for result in group)
        message = wording.screen(attempt).replace("```", "~~~")
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
