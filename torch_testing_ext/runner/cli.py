"""The entry point of run_test.py. Imports that --help does not need happen where they are needed."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from .model import ExitCode
from .options import config
from .options.config import ConfiguredOptions
from .options.options import Action, CannotRun, UsageError

REPORT = "report"  # the first argument of the command that makes reports from a journal


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


def _make_reports(configured: ConfiguredOptions) -> int:
    from . import report_command

    return report_command.make_reports(configured)


def _execute(configured: ConfiguredOptions, root: Path) -> int:
    if configured.options.action is Action.SHOW_CONFIG:
        print(config.show(configured))
        return ExitCode.PASSED
    from . import session

    for number in (signal.SIGTERM, signal.SIGHUP):  # they interrupt like Ctrl-C
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    return session.run(configured.options, configured.options.drop_in_root or root)
