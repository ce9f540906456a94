"""The process in which a unit's tests run, from its first instruction to its exit."""

import itertools
import os
import sys
import time
import traceback
import unittest
from collections.abc import Callable, Mapping
from contextlib import suppress
from os import getpid
from pathlib import Path
from typing import Any, NoReturn

from torch_testing_ext import launch
from torch_testing_ext._process import file_reads, fork_safety, messages, sessions, signals, stacks
from torch_testing_ext._process.channels import Channel
from torch_testing_ext._process.files import DESCRIPTORS_CLOSED, file_behind, write_atomically
from torch_testing_ext._process.terminal import UserTerminal
from torch_testing_ext._testing.bases.tests_for_pytest import PytestTest
from torch_testing_ext._testing.marks.settings_of_tests import TIMEOUT
from torch_testing_ext._tests import notes
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.launch import rank_stops, start
from torch_testing_ext.launch.terminal_turns import StopContext
from torch_testing_ext.runner.model import TestEnd

from .fork_parent_messages import Nothing, PreloadModules
from .reporting_suite import ReportingResult, ReportingSuite
from .unit_spec import UnitSpec
from .worker_messages import AllOver, Ended, FailedSoFar, FromWorker, NotRun, WorkerBroke

__first_frames__ = ("_run_suite", "_run_by_pytest")

# Tests by `Class.test_x`.
Tests = Mapping[str, Any]


def run_and_exit(unit: UnitSpec, find: Callable[[], Tests], channel: Channel[Nothing], log: int) -> NoReturn:
    """Run a worker and exit. `find` returns the tests of its file."""
    code = 1
    reports = Reports(channel, unit)
    try:
        _prepare(unit, log)
        code = run(unit, find(), reports.send)
    except BaseException as error:
        _report_error(reports, error)
    finally:
        _leave(code)


class DescriptorsClosed(Exception):
    """A test closed descriptors of its process that are not its own."""


class Reports:
    """The worker's reports to the runner, over a descriptor that a test may close or replace."""

    def __init__(self, channel: Channel[Nothing], unit: UnitSpec):
        self._channel = channel
        self._unit = unit
        self._pid = getpid()
        self._socket = file_behind(channel.fileno())

    def send(self, message: FromWorker) -> None:
        if getpid() != self._pid:
            # A child that a test forked and that runs on: only the test's own process knows how it ends.
            return
        if file_behind(self._channel.fileno()) != self._socket:
            raise DescriptorsClosed(f"{DESCRIPTORS_CLOSED}, so it could not report how it ended{_so_far(message)}")
        self._channel.send(message)

    def send_by_file(self, message: WorkerBroke) -> None:
        """Report the end of the worker in a way that needs no open descriptor."""
        if getpid() == self._pid:
            write_atomically(self._unit.broke, messages.to_json(message))


def _so_far(message: FromWorker) -> str:
    """The result that could not be sent."""
    if not isinstance(message, (Ended, FailedSoFar)) or message.end.outcome is TestOutcome.PASSED:
        return ""
    return f". It had ended with: {message.end.outcome.value}\n\n{message.end.said}"


def main() -> NoReturn:
    """Run a worker that is a new interpreter: `python -c "... main()" UNIT CHANNEL`."""
    from .loaded_file import LoadedFile

    channel: Channel[Nothing] = Channel.on(int(sys.argv[2]), Nothing)
    unit = UnitSpec.load(Path(sys.argv[1]))
    run_and_exit(unit, lambda: LoadedFile.load(unit.file, unit.load_as).tests, channel, os.dup(1))


def _prepare(unit: UnitSpec, log: int) -> None:
    os.chdir(unit.root)
    sessions.detach(log, keeps_layers=True)
    file_reads.begin(str(unit.reads))
    os.environ.update(unit.variables)
    if "torch_testing_ext.upstream.drop_in" in sys.modules:
        from torch_testing_ext.upstream import drop_in

        # The tests of PyTorch's own files need it.
        drop_in.use_folder(unit.file, unit.directory)
    notes.has_header = True
    stacks.write_on_request(unit.stacks)
    start.work_in(unit.session)
    rank_stops.prepare(StopContext(UserTerminal.here(), unit.directory))
    # Its parents were checked before they forked it.
    fork_safety.of_process.mark_fork_safe()
    signals.unblock()


def run(unit: UnitSpec, found: Tests, send: Callable[[FromWorker], None]) -> int:
    """Run the unit's tests and report each, including missing ones. Returns the exit code."""
    tests = []
    for number, name in enumerate(unit.tests):
        if name in found:
            tests.append((number, found[name]))
        else:
            why = f"{name} was listed, but does not exist when the file is imported again"
            send(NotRun(number, time.monotonic(), TestEnd(TestOutcome.ERROR, why)))
    before = len(sys.modules)
    # All of them, or none.
    are_for_pytest = any(isinstance(test, PytestTest) for _, test in tests)
    if are_for_pytest:
        if not _run_by_pytest(unit, tests, send):
            return 1
    else:
        for number, test in tests:
            # A test that is no TestCase may refuse it.
            with suppress(AttributeError):
                setattr(test, TIMEOUT, unit.timeouts[number])
        result = ReportingResult(unit, tests, send)
        _run_suite(ReportingSuite(tests, result.expect), result)
    hints = _preload_hints(before)
    if hints:
        send(PreloadModules(hints))
    send(AllOver(notes.take_left_running()))
    return 0


def _preload_hints(before: int) -> tuple[str, ...]:
    """The modules of torch that tests have imported, beyond those that were there before, in their order."""
    # From the end: a look at every name would copy the pages of all of them, which takes longer than a small test.
    number = max(0, len(sys.modules) - before)
    new = list(itertools.islice(reversed(sys.modules), number))
    hints = [name for name in reversed(new) if name.startswith("torch.")]
    hints += start.launcher().preload_hints
    return tuple(dict.fromkeys(hints))


def _run_suite(suite: unittest.TestSuite, result: unittest.TestResult) -> None:
    """The first frame that stacks show: see __first_frames__."""
    suite(result)


def _run_by_pytest(unit: UnitSpec, tests: list[tuple[int, Any]], send: Callable[[FromWorker], None]) -> bool:
    """Run the unit by pytest. A function of its own, so that stacks begin here."""
    from . import pytest_run

    return pytest_run.run_tests(unit, tests, send)


def _report_error(reports: Reports, error: BaseException) -> None:
    """Report an exception that unittest let through: KeyboardInterrupt, or an error of ours."""
    if isinstance(error, DescriptorsClosed):
        reports.send_by_file(WorkerBroke(str(error)))
        return
    text = f"{type(error).__name__}: {error}"
    # A test may have replaced what this needs.
    with suppress(Exception):
        text = f"{launch.summarize(error)}\n\n{''.join(traceback.format_exception(error))}"
    message = WorkerBroke(text)
    try:
        reports.send(message)
    except (OSError, DescriptorsClosed):
        reports.send_by_file(message)


def _leave(code: int) -> NoReturn:
    with suppress(Exception):
        start.close()
    with suppress(Exception):
        module = sys.modules.get("torch_testing_ext._torch.compiler_state")
        if module is not None:
            module.end_compile_workers()
    sessions.exit_now(code)
