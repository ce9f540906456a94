"""The tests of a unit, run by pytest in the worker.

A test passes only if pytest has reported that it was set up, called and torn down. All that may be said after that,
by the end of the session, fails the last test.
"""

from __future__ import annotations

import os
import sys
import traceback
import unittest.util
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from torch_testing_ext import launch
from torch_testing_ext._collectives.failure import FailureView, combined
from torch_testing_ext._pytest_ranks.marks import COMMAND, SHOW_COMMAND, SPEC
from torch_testing_ext._pytest_ranks.pytest_internals import item_fixtures
from torch_testing_ext._pytest_ranks.reports import Judgement, TestReports
from torch_testing_ext._testing.bases.tests_for_pytest import PytestTest
from torch_testing_ext._testing.marks.settings_of_tests import TIMEOUT
from torch_testing_ext._tests.notes import warn_user
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.launch import rank_stops
from torch_testing_ext.launch.failure_views import view_of_error

from . import pytest_items, shared_fixtures
from .errors_of_pytest import explain_error
from .pytest_collection import Collection
from .unit_reports import Send, UnitReports
from .unit_spec import UnitSpec
from .worker_messages import FromWorker, WorkerBroke

_END = "the end of pytest's session"
# Sections of a report that are not in the log of the process, or in those of its ranks.
_LOG_SECTIONS = ("Captured log", "log of rank")


def run_tests(unit: UnitSpec, tests: Sequence[tuple[int, PytestTest]], send: Send) -> bool:
    """Run tests, with their numbers in the unit. Returns whether that came to its end."""
    collection = tests[0][1].collection
    items: list[tuple[int, Any]] = [(number, test.item) for number, test in tests]
    if collection.is_for_listing:
        collection = collection.again()
        items = _find_again(collection, tests, UnitReports(unit, send))
    if not items:
        return True
    # pytest makes its folders below this one, which goes with the unit.
    temporary = unit.directory / "tmp"
    temporary.mkdir(exist_ok=True)
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(temporary))
    loop = _Loop(unit, items, send)
    try:
        collection.run([item for _, item in items], loop)
    except BaseException as error:
        if loop.cannot_send is not None:
            raise loop.cannot_send from None
        send(WorkerBroke(explain_error(error)))
        return False
    loop.report_rest(collection.wants_to_stop)
    if collection.failures_counted and not loop.has_failed:
        loop.reports.fixture_failed("a pytest plugin counted a failure that it did not report")
    # The project has hooks for the session.
    _finish(collection, loop, names_end=tests[0][1].collection.is_for_listing)
    return True


def _find_again(
    collection: Collection, tests: Sequence[tuple[int, PytestTest]], reports: UnitReports
) -> list[tuple[int, Any]]:
    """The items of a new session. What it lacks, it reports."""
    by_nodeid = {item.nodeid: item for item in collection.items}
    failures = "\n\n".join(text for _, text in collection.failures) or "pytest did not collect it again"
    items = []
    for number, test in tests:
        item = by_nodeid.get(test.item.nodeid)
        if item is not None:
            items.append((number, item))
        else:
            reports.not_run(number, TestOutcome.ERROR, f"not run: pytest cannot collect it: {failures}")
    return items


def _finish(collection: Collection, loop: _Loop, names_end: bool) -> None:
    """End the session. What goes wrong there fails the last test. `names_end`: it may take its time."""
    if names_end:
        loop.reports.fixture_began(_END)
    status = pytest.ExitCode.TESTS_FAILED if loop.has_failed else pytest.ExitCode.OK
    try:
        changed = collection.finish(status)
    except BaseException as error:
        loop.reports.fixture_failed(f"{_END}: {explain_error(error)}")
    else:
        if changed not in (status, pytest.ExitCode.OK):
            loop.reports.fixture_failed(f"{_END}: a hook has changed the exit status to {changed}")
    if names_end:
        loop.reports.fixture_ended()


class _Loop:
    """The plugin that runs the tests in place of pytest's own loop, and reports each to the runner."""

    def __init__(self, unit: UnitSpec, tests: Sequence[tuple[int, Any]], send: Send):
        self.has_failed = False
        # The error.
        self.cannot_send: BaseException | None = None
        self.reports = UnitReports(unit, self._send)
        self._tests = tests
        self._to_runner = send
        self._of_test = TestReports()
        _, item = tests[0]
        self._hides_warnings = item.config.getoption("disable_warnings", False)
        self._begun: set[int] = set()
        # The number of the running test.
        self._number = -1

    def _send(self, message: FromWorker) -> None:
        try:
            self._to_runner(message)
        except BaseException as error:
            self.cannot_send = error
            raise

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        following = [item for _, item in self._tests[1:]]
        for (number, item), next_item in zip(self._tests, [*following, None], strict=True):
            if session.shouldstop or session.shouldfail:
                break
            self._run(number, item, next_item)
        return True

    def _run(self, number: int, item: Any, following: Any) -> None:
        """Run a test, and report how it ended."""
        self._prepare(number, item)
        is_of_unittest = pytest_items.test_case(item) is not None
        self._of_test = TestReports(partial(self._view_of, number, item) if is_of_unittest else None)
        self._number = number
        self._begun.add(number)
        self.reports.test_began(number)
        rank_stops.at_test()
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        judgements = self._of_test.judge()
        first = judgements[0]
        if first.outcome.is_failure:
            self.has_failed = True
            self._print_logs()
        for judgement in judgements:
            self.reports.note_cause(judgement.cause)
        self.reports.test_ended(number, first.outcome, _failure_or_text(judgements), first.need)

    def _view_of(
        self, number: int, item: Any, error: BaseException, phase: str, subtest: str, text: str
    ) -> FailureView:
        """The failure of a test of unittest, of which pytest's text shows more than what matters."""
        unit = self.reports.unit
        case = launch.Case("", unit.commands[number], "", "", unit.show_commands[number])
        failure = view_of_error(error, case, subtest, text)
        return failure.in_fixture(_fixture_of(error, item) or f"in the {phase}") if phase else failure

    def _prepare(self, number: int, item: Any) -> None:
        """Let the test's ranks, if it has any, know what the run knows."""
        unit = self.reports.unit
        command = unit.commands[number]
        show_command = unit.show_commands[number]
        seconds = unit.timeouts[number]
        item.stash[COMMAND] = command
        item.stash[SHOW_COMMAND] = show_command
        # Test cases ask it, since it is their result object.
        item.command_of = lambda test: command
        item.show_command_of = lambda test: show_command
        spec = item.stash.get(SPEC, None)
        if spec is not None:
            item.stash[SPEC] = replace(spec, timeout=seconds)
        if getattr(item, "cls", None) is not None:
            with suppress(AttributeError, TypeError):
                setattr(item.cls, TIMEOUT, seconds)

    def _print_logs(self) -> None:
        # A test may have closed or replaced stderr.
        with suppress(Exception):
            for title, text in self._of_test.sections():
                if title.startswith(_LOG_SECTIONS):
                    print(f"----- {title} -----\n{text.rstrip()}", file=sys.stderr)

    def report_rest(self, stopped: str) -> None:
        """Report that pytest did not run the rest of the tests, or wants to stop after the last one."""
        message = "pytest did not run it"
        if stopped:
            why = f"pytest was asked to stop: {stopped}"
            self.reports.fixture_failed(why)
            message = f"{message}: {why}"
        for number, _ in self._tests:
            if number not in self._begun:
                self.reports.not_run(number, TestOutcome.ERROR, message)

    # -- what the other plugins say

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Generator[None, Any, Any]:
        error = _stop_at(call)
        report = yield
        # pytest gives the exceptions of tests of unittest only now.
        self._of_test.made(report, error or _stop_at(call))
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: Any) -> None:
        self._of_test.add(report)
        if report.failed and report.when != "teardown":
            failures = self._of_test.judge()
            outcome, failure = failures[0].outcome, _failure_or_text(failures)
            self.reports.failed_so_far(self._number, outcome, failure)

    def pytest_warning_recorded(self, warning_message: Any, nodeid: str) -> None:
        """Note a warning for the summary. Show that a thread died, and keep its traceback in the log of the test."""
        category = warning_message.category
        text = str(warning_message.message)
        if not issubclass(category, pytest.PytestUnhandledThreadExceptionWarning):
            place = f"{warning_message.filename}:{warning_message.lineno}"
            if not self._hides_warnings:
                self.reports.note_warning(place, category.__name__, text)
        else:
            warn_user(f"{nodeid}: {text.splitlines()[0]}")
            # A test may have closed or replaced stderr.
            with suppress(Exception):
                print(text, file=sys.stderr, flush=True)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Generator[None, Any, Any]:
        """Say which tests wait for a fixture that they share."""
        owner = getattr(request.node, "obj", None)
        if fixturedef.scope == "function" or shared_fixtures.does_nothing(fixturedef, owner):
            return (yield)
        numbers = [number for number, item in self._tests if fixturedef in _definitions(item)]
        self.reports.shared_fixture_began(shared_fixtures.name_of_fixture(fixturedef, request.node), tuple(numbers))
        try:
            return (yield)
        finally:
            self.reports.shared_fixture_ended()


# Whether a fixture of unittest is one of its class, by its name.
_OF_UNITTEST = {"setUpClass": True, "tearDownClass": True, "setUpModule": False, "tearDownModule": False}


def _fixture_of(error: BaseException, item: Any) -> str:
    """The fixture of unittest that has raised, as unittest names it; "" if none has."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name = frame.f_code.co_name
        if name in _OF_UNITTEST:
            owner = unittest.util.strclass(item.cls) if _OF_UNITTEST[name] else item.cls.__module__
            return f"{name} ({owner})"
    return ""


def _definitions(item: Any) -> Iterator[Any]:
    for definitions in item_fixtures.fixture_definitions(item).values():
        yield from definitions


def _stop_at(call: Any) -> BaseException | None:
    """The exception of a phase of a test, at which a debugger may stop; None without one."""
    if call.excinfo is None:
        return None
    error: BaseException = call.excinfo.value
    if not isinstance(getattr(error, "outcome", None), launch.TestOutcome):
        rank_stops.at_failure(error)
    return error


def _failure_or_text(judgements: Sequence[Judgement]) -> FailureView | str:
    """The failures of a test as one; a text where there is none."""
    if not _has_failed(judgements[0]):
        return "\n\n".join(map(_text, judgements))
    failures = []
    for judgement in judgements:
        if _has_failed(judgement):
            failures.append(judgement.view)
        else:
            failures.append(FailureView.of_text(_text(judgement)))
    return combined(failures)


def _has_failed(judgement: Judgement) -> bool:
    """Whether an exception has been reported."""
    is_expected = judgement.outcome is TestOutcome.UNEXPECTED_SUCCESS
    return judgement.outcome.is_failure and not is_expected and not judgement.is_unfinished


def _text(judgement: Judgement) -> str:
    if judgement.outcome is TestOutcome.UNEXPECTED_SUCCESS:
        return f"expected to fail, but passed: {judgement.reason}".removesuffix(": ")
    if judgement.passed_against_xfail:
        return f"passed, although it is marked xfail (not strict): {judgement.reason}".removesuffix(": ")
    return judgement.view.whole if _has_failed(judgement) else judgement.text or judgement.title or judgement.reason
