"""How pytest shows a verdict: the message once, since it has everything, and no frames of ours."""

from __future__ import annotations

from typing import Any

from .internals import plain_text


def show(report: Any, excinfo: Any, item: Any) -> None:
    """Let a report show the message of a verdict in place of a traceback, and the line of the test."""
    message = str(excinfo.value)
    first = message.partition("\n")[0]
    path, line, _ = report.location
    in_test = [entry for entry in excinfo.traceback if entry.path == getattr(item, "path", None)]
    if in_test:
        line = in_test[-1].lineno
        message += f"\n\n{path}:{line + 1}: in {in_test[-1].name}"
    report.longrepr = plain_text(message, path, (line or 0) + 1, first)
