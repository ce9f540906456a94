"""`run_test.py report`: makes the reports of a run from its journal, also of one that was killed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from .model import exit_code
from .options.config import COMMAND_LINE, ConfiguredOptions
from .options.options import Options, UsageError
from .options.table import OPTION_TABLE
from .report import journal, remake_reports
from .session import exit_code_with

APPLICABLE = ("names", "junit", "report", "trace", "results", "durations", "cache")


def make_reports(configured: ConfiguredOptions) -> int:
    """Makes the reports that the options name, and prints the summary. Returns the exit code of the run."""
    _reject_other_options(configured)
    options = configured.options
    try:
        run = journal.read(journal.find(_place(options)))
    except journal.JournalError as error:
        raise UsageError(str(error)) from None
    reporters = remake_reports(options, sys.stdout, os.environ, run)
    return exit_code_with(reporters, exit_code(run.summary, run.header.allow_all_skipped))


def _reject_other_options(configured: ConfiguredOptions) -> None:
    given = [field for field, source in configured.sources.items() if source == COMMAND_LINE]
    for field in given:
        if field not in APPLICABLE:
            flags = OPTION_TABLE[field].flags or tuple(n for flag in OPTION_TABLE[field].values for n in flag.names)
            raise UsageError(f"report: {flags[0]} does not apply to a run that is over")


def _place(options: Options) -> Path:
    if len(options.names) > 1:
        raise UsageError("report: name one journal, or the folder of one run")
    return Path.cwd() / options.names[0] if options.names else options.cache
