"""The text of a failure in a report, and the debugger that opens at it."""

from __future__ import annotations

import io
from typing import Any

import pytest
from _pytest._code.code import (
    ExceptionChainRepr,
    ReprEntryNative,
    ReprExceptionInfo,
    ReprFileLocation,
    ReprTraceback,
)
from _pytest._io import TerminalWriter
from _pytest.debugging import _enter_pdb

from torch_testing_ext._tests.source_files import is_library

# The plugins of --pdb and --trace, by the names that pytest registers them with.
DEBUGGER, TRACE = "pdbinvoke", "pdbtrace"


def exception_info(error: BaseException) -> pytest.ExceptionInfo[BaseException]:
    """An error that was raised, as pytest's hooks get it. `ExceptionInfo.from_exception`: since 7.4."""
    assert error.__traceback__ is not None
    return pytest.ExceptionInfo.from_exc_info((type(error), error, error.__traceback__))


def failure_text(item: Any, error: BaseException) -> str:
    """The text that pytest shows of an error; the last function in full only if it is the project's."""
    raised = exception_info(error)
    shown = item.repr_failure(raised)
    if isinstance(shown, ExceptionChainRepr) and item.config.getoption("tbstyle", "auto") == "auto":
        places = [getattr(traceback.reprentries[-1], "reprfileloc", None) for traceback, *_ in shown.chain]
        of_library = [place is not None and is_library(place.path) for place in places]
        short = item._repr_failure_py(raised, style="short") if any(of_library) else shown
        for (traceback, *_), (of_short, *_), is_of_library in zip(shown.chain, short.chain, of_library, strict=True):
            if is_of_library:
                traceback.reprentries = [*traceback.reprentries[:-1], of_short.reprentries[-1]]
    return str(shown)


def text_of(report: Any) -> str:
    """The text of a report as pytest shows it. `longreprtext` cuts off the indentation of the first line."""
    stream = io.StringIO()
    writer = TerminalWriter(stream)
    writer.hasmarkup = False
    report.toterminal(writer)
    return stream.getvalue().rstrip().lstrip("\n")


def plain_text(text: str, path: str, line: int, summary: str) -> Any:
    """Make a text that a report shows in place of a traceback. `line` counts from 1."""
    traceback = ReprTraceback([ReprEntryNative([f"{text}\n"])], None, "native")
    return ReprExceptionInfo(traceback, ReprFileLocation(path, line, summary))


class _ColouredText(ReprEntryNative):
    """The text of a failure, with the style of each of its first lines."""

    def __init__(self, lines: list[str], styles: list[str]):
        super().__init__(lines)
        self._styles = styles

    def toterminal(self, tw: TerminalWriter) -> None:
        for at, line in enumerate(self.lines[0].rstrip("\n").split("\n")):
            style = self._styles[at] if at < len(self._styles) else None
            tw.line(line, **({style: True} if style else {}))


_ColouredText.__name__ = ReprEntryNative.__name__  # by which xdist sends it


def colour(report: Any) -> None:
    """Let a report of a failure on one screen, which may come from a worker of xdist, have colours."""
    styles = getattr(report, "line_styles", None)
    entries: Any = getattr(getattr(report.longrepr, "reprtraceback", None), "reprentries", ())
    if styles and len(entries) == 1 and type(entries[0]) is ReprEntryNative:
        entries[0] = _ColouredText([*entries[0].lines], styles)


def enter_debugger(item: Any, excinfo: Any, report: Any) -> None:
    """Open the debugger of --pdb at an exception. Raises pytest.exit.Exception when the user quits."""
    _enter_pdb(item, excinfo, report)
