"""The reports of a run: on the console, in files, as annotations on GitHub.

Reports are made from events alone. A report never asks an engine and never decides an outcome: a report that cannot be
written causes a warning, and the outcome and exit code of the run remain.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from torch_testing_ext._process.kept_accounts import make_cache_folder

from ..events import Reporter, Reporters, Warned
from ..model import Policy
from ..options.options import Options, Verbosity
from .terminal import ConsoleLayout, LineWriter, TerminalStream, columns, is_terminal, make_styler

if TYPE_CHECKING:
    from .console import Console
    from .history import Render
    from .journal import RecordedRun
    from .live import Live
    from .status_line import StatusLine

# A report is imported where it is made: --list, which imports nothing else, needs none of them.


def make_reporters(options: Options, stream: TextIO, environ: Mapping[str, str]) -> Reporters:
    """All reporters of a run. The console is the last, so that the warnings of others appear above its last line."""
    from . import journal
    from .github import GitHub
    from .history import Files
    from .status_line import StatusLine

    terminal = TerminalStream(stream)
    live: Live | StatusLine | None = None
    if is_terminal(stream, environ) and not options.pdb:
        if importlib.util.find_spec("rich") is None:
            live = StatusLine(terminal, partial(columns, stream, environ))
        else:
            from .live import Live

            live = Live(terminal, options.policy)
    console = _make_console(live or terminal, options, stream, environ, options.policy, options.command)

    def warn(message: str) -> None:
        console.on_event(Warned(message))

    prepare = partial(make_cache_folder, options.cache) if options.journal is None else lambda: None
    place = journal.place_of_new(options.cache / "runs") if options.journal is None else options.journal
    kept = journal.Journal(place, journal.header_of(options), warn, prepare)
    others: list[Reporter] = [kept, Files(_file_reports(options), warn)]
    if environ.get("GITHUB_ACTIONS") == "true":
        step_summary = environ.get("GITHUB_STEP_SUMMARY")
        others.append(GitHub(console.writer, Path(step_summary) if step_summary else None))
    return Reporters([*others, *([live] if live else []), console])


def remake_reports(options: Options, stream: TextIO, environ: Mapping[str, str], run: RecordedRun) -> Reporters:
    """Makes the reports of a run that is over, and prints its summary."""
    from .history import Files

    command, policy = run.header.command, run.header.policy
    options = dataclasses.replace(options, verbosity=Verbosity.QUIET)
    console = _make_console(TerminalStream(stream), options, stream, environ, policy, command)
    renderers = _file_reports(options, command)
    reporters = Reporters([Files(renderers, warn=lambda message: console.on_event(Warned(message)))])
    for event in run.events:
        reporters.on_event(event)
    Reporters([console], reporters.errors).on_event(run.events[-1])
    return reporters


def _make_console(
    writer: LineWriter, options: Options, stream: TextIO, environ: Mapping[str, str], policy: Policy, command: str
) -> Console:
    from .console import Console

    styler, layout = make_styler(stream, environ), partial(_layout, options, stream, environ)
    return Console(writer, styler, options.verbosity, options.durations, policy, command, layout, options.status_level)


def _layout(options: Options, stream: TextIO, environ: Mapping[str, str]) -> ConsoleLayout:
    """The layout now: the user may resize the terminal during the run."""
    complete = next((str(path) for path in (options.report, options.results, options.junit) if path), "")
    whole = options.verbosity is Verbosity.VERBOSE
    return ConsoleLayout(columns(stream, environ), complete, options.show_command, whole)


def _file_reports(options: Options, command: str | None = None) -> dict[Path, Render]:
    from . import html_page, json_results, junit, perfetto

    renderers: dict[Path | None, Render] = {
        options.junit: junit.render,
        options.report: partial(html_page.render, command=command or options.command),
        options.trace: perfetto.render,
        options.results: json_results.render,
    }
    return {path: render for path, render in renderers.items() if path is not None}
