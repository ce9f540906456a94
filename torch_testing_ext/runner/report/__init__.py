"""The reports of a run: on the console, in files, as annotations on GitHub.

Imports the runner's data and nothing that runs tests. Reports are made from events alone. A report never asks an
engine and never decides an outcome: a report that cannot be written causes a warning, and the outcome and exit code of
the run remain.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, TextIO

from torch_testing_ext._tests.kept_failures import make_cache_folder
from torch_testing_ext.runner import doors, run_again
from torch_testing_ext.runner.events import Reporter, Reporters, Warned
from torch_testing_ext.runner.model import Policy, TestId
from torch_testing_ext.runner.options import Options, Verbosity

from .console_layout import ConsoleLayout
from .console_style import columns, is_terminal, make_styler
from .file_report import FileReport as FileReport
from .recorder import History as History
from .report_request import ReportRequest as ReportRequest
from .terminal_stream import LineWriter, TerminalStream

if TYPE_CHECKING:
    from .console import Console
    from .import_note import ImportNote
    from .journal_reader import RecordedRun
    from .journal_writer import Journal
    from .live_display import Live


# pyproject.toml declares the same.
OWN_REPORTS = {
    **{
        name: f"torch_testing_ext.runner.report.own_reports:{name}"
        for name in ("junit", "html", "perfetto", "json", "github")
    },
    "run_file": "torch_testing_ext.runner.run_files.writing:run_file",
}


# A report is imported where it is made: --list, which imports nothing else, needs none of them.


def make_reporters(options: Options, stream: TextIO, environ: Mapping[str, str]) -> Reporters:
    """All reporters of a run. The console is the last, so that the warnings of others appear above its last line."""
    terminal = TerminalStream(stream)
    status = None
    if is_terminal(stream, environ) and not options.takes_terminal:
        status = make_status(terminal, options.policy)
    command = run_again.command(options)
    console = _make_console(status or terminal, options, stream, environ, options.policy, command)

    def warn(message: str) -> None:
        console.on_event(Warned(message))

    request = ReportRequest(
        options,
        environ,
        command,
        console.writer,
        warn,
        coloured=console.styler.is_coloured,
        columns=columns(stream, environ),
    )
    reporters: list[Reporter] = [_make_journal(options, warn), *_from_door(request)]
    if status is not None:
        reporters.append(status)
    reporters.append(console)
    return Reporters(reporters)


def _from_door(request: ReportRequest) -> Iterator[Reporter]:
    """The reports of all packages that are wanted for a run, ours among them."""
    for name, entry in doors.entries(doors.REPORTS, OWN_REPORTS).items():
        try:
            reporter = entry.load()(request)
        except Exception as error:
            request.warn(f"the report {name} ({entry.value}) could not be made: {type(error).__name__}: {error}")
        else:
            if reporter is not None:
                yield reporter


def make_status(terminal: TerminalStream, policy: Policy) -> Live | ImportNote:
    """The live display of a run on a terminal; where rich is not installed, a line at its beginning."""
    if importlib.util.find_spec("rich") is None:
        from .import_note import ImportNote

        return ImportNote(terminal)
    from .live_display import Live

    return Live(terminal, policy)


def _make_journal(options: Options, warn: Callable[[str], None]) -> Journal:
    from . import journal, journal_writer

    header = journal.header_of(options)
    if options.journal is not None:
        return journal_writer.Journal(options.journal, header, warn, lambda: None)
    place = journal_writer.place_of_new(options.cache / "runs")
    return journal_writer.Journal(place, header, warn, partial(make_cache_folder, options.cache))


def remake_reports(
    options: Options,
    stream: TextIO,
    environ: Mapping[str, str],
    run: RecordedRun,
    changes: Mapping[TestId, str] | None = None,
) -> Reporters:
    """Makes the reports of a run that is over, and prints its summary. `changes`: what is new since an earlier one."""
    command, policy = run.header.command, run.header.policy
    options = dataclasses.replace(options, verbosity=Verbosity.QUIET)
    console = _make_console(TerminalStream(stream), options, stream, environ, policy, command)

    def warn(message: str) -> None:
        console.on_event(Warned(message))

    request = ReportRequest(options, environ, command, console.writer, warn, is_over=True, changes=changes or {})
    reporters = Reporters([*_from_door(request)])
    for event in run.events:
        reporters.on_event(event)
    Reporters([console], reporters.errors).on_event(run.events[-1])
    return reporters


def _make_console(
    writer: LineWriter,
    options: Options,
    stream: TextIO,
    environ: Mapping[str, str],
    policy: Policy,
    command: str,
) -> Console:
    """The console report of a run."""
    from .console import Console

    files = (options.html, options.results, options.junitxml)
    complete = next((str(file) for file in files if file), "")
    whole = options.verbosity is Verbosity.VERBOSE
    layout = ConsoleLayout(complete=complete, show=run_again.show_command(options), whole=whole)
    return Console(
        writer,
        make_styler(stream, environ),
        options.verbosity,
        options.durations,
        policy,
        command,
        layout,
        partial(columns, stream, environ),
        options.status_level,
        options.html,
    )
