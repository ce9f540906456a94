"""The reports of a run: on the console, in files, as annotations on GitHub.

Reports are made from events alone. A report never asks an engine and never decides an outcome: a report that cannot be
written causes a warning, and the outcome and exit code of the run remain.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ..events import Reporter, Reporters, Warned
from ..model import Policy
from ..options.options import Options
from . import html_page, json_results, junit, perfetto
from .console import Console
from .files import Files, Render
from .github import GitHub
from .layout import ConsoleLayout
from .terminal import LineWriter, TerminalStream, columns, is_terminal, make_styler

if TYPE_CHECKING:
    from .live import Live


def make_reporters(options: Options, stream: TextIO, environ: Mapping[str, str]) -> Reporters:
    """All reporters of a run. The console is the last, so that the warnings of others appear above its last line."""
    terminal = TerminalStream(stream)
    live = _live(terminal, options.policy) if is_terminal(stream, environ) else None
    writer: LineWriter = live or terminal
    console = Console(
        writer,
        make_styler(stream, environ),
        options.verbosity,
        options.durations,
        options.policy,
        options.command,
        partial(_layout, options, stream, environ),
    )
    others: list[Reporter] = [Files(_file_reports(options), warn=lambda message: console.on_event(Warned(message)))]
    if environ.get("GITHUB_ACTIONS") == "true":
        others.append(GitHub(writer))
    return Reporters([*others, *([live] if live else []), console])


def _layout(options: Options, stream: TextIO, environ: Mapping[str, str]) -> ConsoleLayout:
    """The layout now: the user may resize the terminal during the run."""
    complete = next((str(path) for path in (options.report, options.results, options.junit) if path), "")
    return ConsoleLayout(columns(stream, environ), complete)


def _live(terminal: TerminalStream, policy: Policy) -> Live | None:
    """The live display, if rich is installed."""
    if importlib.util.find_spec("rich") is None:
        return None
    from .live import Live

    return Live(terminal, policy)


def _file_reports(options: Options) -> dict[Path, Render]:
    renderers: dict[Path | None, Render] = {
        options.junit: junit.render,
        options.report: partial(html_page.render, command=options.command),
        options.trace: perfetto.render,
        options.results: json_results.render,
    }
    return {path: render for path, render in renderers.items() if path is not None}
