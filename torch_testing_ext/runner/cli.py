"""The entry point of the runner. Imports that --help does not need happen where they are needed."""

import dataclasses
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from torch_testing_ext._process import system, user_commands
from torch_testing_ext._process.devices_setting import DEVICES_OF_RUN
from torch_testing_ext._process.project_folder import project_root
from torch_testing_ext._tests import launcher_variables

from .model import ExitCode
from .options import Action, CannotRun, UsageError, sources
from .options.commands import COMMANDS, OF_RUN_FILES
from .options.sources import ConfiguredOptions
from .report_command import make_reports
from .show_command import show_runs


def console() -> int:
    """The console script and `python -m`: the runner for the project in which the user stands."""
    # As under torchrun: a rank takes one slot.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return guarded(lambda: main(sys.argv[1:], project_root(_working_folder())))


def main(argv: Sequence[str], root: Path, *, as_pytorch: bool = False) -> int:
    """Runs the runner and returns its exit code. `root`: of the project. `as_pytorch`: -i and -x are PyTorch's."""
    _open_standard_streams()
    # The runner is no rank, whatever has started it, and its tests have ranks of their own.
    launcher_variables.drop_place(os.environ)
    return guarded(lambda: _do(argv, root, as_pytorch))


def _working_folder() -> Path:
    """The folder in which the user stands. Raises CannotRun if it was deleted, or is closed to the user."""
    why = user_commands.why_no_working_folder()
    if why:
        raise CannotRun(why)
    return Path.cwd()


def _do(argv: Sequence[str], root: Path, as_pytorch: bool) -> int:
    """Do what the command line says, and return the exit code."""
    _working_folder()
    command, words = _command(argv)
    if command == "init":
        from .init_project import init

        return init(words, root, main)
    if command in OF_RUN_FILES:
        from .run_files.run_file_commands import of_run_files

        return of_run_files(command, words, root)
    if command == "moving":
        from torch_testing_ext.moving import main as convert

        return convert(words, f"{user_commands.runner_name()} {command}")
    configured = sources.read_options(words, os.environ, root, Path.cwd(), command, as_pytorch=as_pytorch)
    match command:
        case "":
            return _execute(configured, root)
        case "config":
            if configured.options.names:
                raise UsageError("config: it takes no names, only -o NAME=VALUE")
            print(sources.show_options(configured))
            return ExitCode.PASSED
        case "report":
            return make_reports(configured)
        case "why":
            if not configured.options.names:
                raise UsageError("why: name a test")
            options = dataclasses.replace(configured.options, why=configured.options.names, names=())
            return _execute(dataclasses.replace(configured, options=options), root)
        case "cluster clean":
            from torch_testing_ext.runner.cluster.cluster_site import clean

            return clean(configured.options)
        case _:
            return show_runs(configured, root)


def _command(argv: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The command that the words begin with, and the words after it; a run of tests has the name ""."""
    for name in COMMANDS:
        count = len(name.split())
        if " ".join(argv[:count]) == name:
            return name, argv[count:]
    if list(argv[:1]) == ["cluster"] and not {"-h", "--help"}.isdisjoint(argv):
        return "cluster clean", argv[1:]
    return "", argv


def guarded(do: Callable[[], int]) -> int:
    """Return an exit code for whatever comes of it: each exception has a code and a message."""
    try:
        code = do()
        sys.stdout.flush()
        return code
    except (UsageError, CannotRun) as error:
        print(f"{user_commands.runner_name()}: {error}", file=sys.stderr)
        return ExitCode.USAGE if isinstance(error, UsageError) else ExitCode.OUR_ERROR
    except KeyboardInterrupt:
        print(f"{user_commands.runner_name()}: interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # The reader of the output is gone, as in `--list | head`.
        _discard_stdout()
        return ExitCode.OUR_ERROR
    except Exception as error:
        # stderr may be what is broken.
        with suppress(OSError):
            traceback.print_exc()
            print(f"{user_commands.runner_name()}: internal error; this is not a test failure", file=sys.stderr)
        if isinstance(error, OSError):
            _discard_stdout()
        return ExitCode.OUR_ERROR


def _open_standard_streams() -> None:
    """Make sure that all can be written.

    Streams that were closed at the start, as by `>&-`, go to /dev/null: no other file may get their numbers.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # Gets the lowest free number.
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream in (sys.__stdout__, sys.__stderr__):
            # Names of tests, and texts of failures, may have what the encoding of the terminal lacks.
            stream.reconfigure(errors="backslashreplace")


def _discard_stdout() -> None:
    from torch_testing_ext.runner.report.terminal_stream import discard

    discard(sys.stdout)


def _execute(configured: ConfiguredOptions, root: Path) -> int:
    """Run or list tests."""
    if not system.CAN_FORK:
        raise CannotRun("torchtest forks a process that has imported torch, which needs Linux: run tests by pytest")
    from . import aspects_of_run, run_session

    options = configured.options
    for note in configured.notes:
        print(note, file=sys.stderr)
    os.environ[DEVICES_OF_RUN] = options.devices
    if options.pytest:
        # The last of them counts.
        os.environ["PYTEST_ADDOPTS"] = f"{os.environ.get('PYTEST_ADDOPTS', '')} {options.pytest}".strip()
    aspects_of_run.begin(options)
    # They interrupt like Ctrl-C.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    root = options.drop_in_root or root
    if options.watch:
        from .watching import watch

        return watch(options, root, guarded)
    if options.coverage and options.action is Action.RUN:
        from .coverage_of_run import measured

        with measured(options.coverage):
            return run_session.run(options, root)
    return run_session.run(options, root)
