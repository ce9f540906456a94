"""The colours of the console."""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from typing import TextIO

from torch_testing_ext._tests.outcomes import TestOutcome


class Style(enum.Enum):
    """Text styles, as ANSI codes."""

    GREEN = "32"
    RED = "31;1"
    YELLOW = "33"
    FAINT = "2"
    BOLD = "1"


STYLE_OF_VERDICT = {TestOutcome.PASSED: Style.GREEN, TestOutcome.FAILED: Style.RED, TestOutcome.SKIPPED: Style.FAINT}
STYLE_OF = {
    **{outcome: STYLE_OF_VERDICT[outcome.counts_as] for outcome in TestOutcome},
    TestOutcome.LEAKED: Style.YELLOW,
    TestOutcome.FLAKY: Style.YELLOW,
}


class Styler:
    """Applies styles to text, if colours are on."""

    def __init__(self, coloured: bool):
        self.is_coloured = coloured

    def __call__(self, style: Style, text: str) -> str:
        if not self.is_coloured:
            return text
        return f"\x1b[{style.value}m{text}\x1b[0m"


def make_styler(stream: TextIO, environ: Mapping[str, str]) -> Styler:
    """Uses colours on terminals and with FORCE_COLOR, but never with NO_COLOR."""
    wanted = bool(environ.get("FORCE_COLOR")) or is_terminal(stream, environ)
    return Styler(wanted and not environ.get("NO_COLOR"))


def columns(stream: TextIO, environ: Mapping[str, str]) -> int | None:
    """The width of the terminal that shows a stream, now; None if there is none. As usual, COLUMNS overrides it."""
    chosen = environ.get("COLUMNS", "")
    if chosen.isascii() and chosen.isdigit() and int(chosen):
        return int(chosen)
    if not is_terminal(stream, environ):
        return None
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):
        # A stream without a descriptor.
        return None


def is_terminal(stream: TextIO, environ: Mapping[str, str]) -> bool:
    return stream.isatty() and environ.get("TERM", "dumb") != "dumb"
