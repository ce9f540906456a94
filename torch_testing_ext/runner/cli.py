"""The entry point of run_test.py. Imports that --help does not need happen where they are needed."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from .model import ExitCode, exit_code
from .options import config
from .options.config import ConfiguredOptions
from .options.options import Action, CannotRun, Options, UsageError
from .options.table import OPTION_TABLE

REPORT = "report"  # the first argument of the command that makes reports from a journal, also of a run that was killed
APPLICABLE_TO_REPORT = ("names", "junit", "report", "trace", "results", "durations", "cache")


def main(argv: Sequence[str], root: Path) -> int:
    """Runs run_test.py and returns its exit code. `root` is the project's folder."""
    _open_standard_streams()
    try:
        if argv[:1] == [REPORT]:
            code = _make_reports(config.read_options(argv[1:], os.environ, root, Path.cwd()))
        else:
            code = _execute(config.read_options(argv, os.environ, root, Path.cwd()), root)
        sys.stdout.flush()
        return code
    except UsageError as error:
        print(f"run_test.py: {error}", file=sys.stderr)
        return ExitCode.USAGE
    except CannotRun as error:
        print(f"run_test.py: {error}", file=sys.stderr)
        return ExitCode.OUR_ERROR
    except KeyboardInterrupt:
        print("run_test.py: interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except BrokenPipeError:  # the reader of the output is gone, as in `--list | head`
        _discard_stdout()
        return ExitCode.OUR_ERROR
    except Exception as error:
        with suppress(OSError):  # stderr may be what is broken
            traceback.print_exc()
            print("run_test.py: internal error; this is not a test failure", file=sys.stderr)
        if isinstance(error, OSError):
            _discard_stdout()
        return ExitCode.OUR_ERROR


def _open_standard_streams() -> None:
    """Give streams that were closed at the start, as by `>&-`, to /dev/null: no other file may get their numbers."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _discard_stdout() -> None:
    """Python flushes stdout again when it exits, and would complain."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _execute(configured: ConfiguredOptions, root: Path) -> int:
    if configured.options.action is Action.SHOW_CONFIG:
        print(config.show(configured))
        return ExitCode.PASSED
    from . import session

    for number in (signal.SIGTERM, signal.SIGHUP):  # they interrupt like Ctrl-C
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    return session.run(configured.options, configured.options.drop_in_root or root)


# -- run_test.py report


def _make_reports(configured: ConfiguredOptions) -> int:
    """Makes the reports that the options name, and prints the summary. Returns the exit code of the run."""
    from .report import journal, remake_reports
    from .session import exit_code_with

    _reject_other_options(configured)
    options = configured.options
    try:
        run = journal.read(journal.find(_place_of_journal(options)))
    except journal.JournalError as error:
        raise UsageError(str(error)) from None
    reporters = remake_reports(options, sys.stdout, os.environ, run)
    return exit_code_with(reporters, exit_code(run.summary, run.header.allow_all_skipped))


def _reject_other_options(configured: ConfiguredOptions) -> None:
    given = [field for field, source in configured.sources.items() if source == config.COMMAND_LINE]
    for field in given:
        if field not in APPLICABLE_TO_REPORT:
            flags = OPTION_TABLE[field].flags or tuple(n for flag in OPTION_TABLE[field].values for n in flag.names)
            raise UsageError(f"report: {flags[0]} does not apply to a run that is over")


def _place_of_journal(options: Options) -> Path:
    if len(options.names) > 1:
        raise UsageError("report: name one journal, or the folder of one run")
    return Path.cwd() / options.names[0] if options.names else options.cache
