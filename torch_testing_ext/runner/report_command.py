"""The command `report`."""

import os
import sys
from pathlib import Path

from .model import ExitCode, exit_code
from .options import UsageError
from .options.sources import ConfiguredOptions


def make_reports(configured: ConfiguredOptions) -> int:
    """Makes the reports that the options name, and prints the summary. Returns the exit code of the run.

    With `--about`, prints what a report of a bug needs instead.
    """
    from torch_testing_ext.runner.report import journal, journal_reader, remake_reports

    from .work_run import exit_code_with

    options = configured.options
    if len(options.names) > 1:
        raise UsageError("report: name one journal, or the folder of one run")
    place = Path.cwd() / options.names[0] if options.names else options.cache
    if options.about:
        from torch_testing_ext.runner.report import about

        print(*about.lines_about(os.environ, place), sep="\n")
        return ExitCode.PASSED
    try:
        run = journal_reader.read_journal(journal_reader.find_journal(place))
    except journal.JournalError as error:
        raise UsageError(str(error)) from None
    reporters = remake_reports(options, sys.stdout, os.environ, run)
    return exit_code_with(reporters, exit_code(run.summary, run.header.allow_all_skipped))
