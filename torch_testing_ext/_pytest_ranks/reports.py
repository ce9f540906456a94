"""How pytest shows a verdict: the message once, since it has everything, and no frames of ours."""

from __future__ import annotations

from typing import Any

from _pytest._code.code import ReprEntryNative, ReprExceptionInfo, ReprFileLocation, ReprTraceback


def show(report: Any, message: str) -> None:
    """Let a report show this message in place of a traceback."""
    path, line, _ = report.location
    first = message.partition("\n")[0]
    entry = ReprEntryNative([f"{message}\n"])
    report.longrepr = ReprExceptionInfo(
        ReprTraceback([entry], None, "native"), ReprFileLocation(path, (line or 0) + 1, first)
    )
