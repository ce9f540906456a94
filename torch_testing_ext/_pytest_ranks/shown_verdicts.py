"""Verdicts on ranks as reports of pytest show them."""

from __future__ import annotations

from typing import Any

from torch_testing_ext._collectives.failure import LineKind

from .pytest_internals.failure_texts import plain_text

_STYLES = {
    LineKind.TITLE: "bold",
    LineKind.FAULT: "bold",
    LineKind.GOT: "red",
    LineKind.EXPECTED: "green",
    LineKind.COMMAND: "light",
}


def show(report: Any, excinfo: Any, item: Any) -> None:
    """Let a report show the message of a verdict once, since it has everything, and the line of the test."""
    message = str(excinfo.value)
    first = message.partition("\n")[0]
    failure = getattr(excinfo.value, "failure", None)
    if failure is not None and failure.show_command:
        # An attribute that xdist sends with the report.
        report.line_styles = [_STYLES.get(line.kind, "") for line in failure.lines()]
    path, line, _ = report.location
    in_test = [entry for entry in excinfo.traceback if entry.path == getattr(item, "path", None)]
    if in_test:
        line = in_test[-1].lineno
        message += f"\n\n{path}:{line + 1}: in {in_test[-1].name}"
    report.longrepr = plain_text(message, path, (line or 0) + 1, first)
