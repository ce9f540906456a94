"""What a run tells: on the console, in files, to GitHub.

Written from events alone. A report never asks an engine, and never decides an outcome: one that cannot be written is a
warning, and the run's outcome and exit code stand.
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
from .terminal import LineWriter, TerminalStream, is_terminal, styler

if TYPE_CHECKING:
    from .live import Live


def make_reporters(options: Options, stream: TextIO, environ: Mapping[str, str]) -> Reporters:
    """All that hear of a run. The console hears last: what others warn of stands above its last line."""
    terminal = TerminalStream(stream)
    live = _live(terminal, options.policy) if is_terminal(stream, environ) else None
    page: LineWriter = live or terminal
    console = Console(
        page, styler(stream, environ), options.verbosity, options.durations, options.policy, options.command
    )
    others: list[Reporter] = [Files(_wanted(options), warn=lambda words: console.on_event(Warned(words)))]
    if environ.get("GITHUB_ACTIONS") == "true":
        others.append(GitHub(page))
    return Reporters([*others, *([live] if live else []), console])


def _live(terminal: TerminalStream, policy: Policy) -> Live | None:
    """Only where rich is installed: it is a wish, not a need."""
    if importlib.util.find_spec("rich") is None:
        return None
    from .live import Live

    return Live(terminal, policy)


def _wanted(options: Options) -> dict[Path, Render]:
    asked: dict[Path | None, Render] = {
        options.junit: junit.render,
        options.report: partial(html_page.render, command=options.command),
        options.trace: perfetto.render,
        options.results: json_results.render,
    }
    return {path: render for path, render in asked.items() if path is not None}
