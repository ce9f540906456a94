"""Runs the tests of a unit by pytest, in the worker, and turns the reports of pytest's plugins into outcomes.

A test passes only if pytest has reported that it was set up, called and torn down. All that may be said after that, by
the end of the session, fails the last test.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from torch_testing_ext import launch
from torch_testing_ext._cases.pytest_style import PytestTest
from torch_testing_ext._collectives.failure import FailureView, combined
from torch_testing_ext._marks.settings_of_tests import TIMEOUT
from torch_testing_ext._pytest_ranks.marks import COMMAND, SHOW_COMMAND, SPEC
from torch_testing_ext._pytest_ranks.reports import Ending, Judgement, TestReports
from torch_testing_ext.launch import stopping

from ..model import COUNTS_AS, Category, TestOutcome
from .pytest_session import Collection, explain
from .unit_reports import Send, UnitReports
from .worker_messages import FromWorker, UnitSpec, WorkerBroke

_END = "the end of pytest's session"
# Sections of a report that are not in the log of the process, or in those of its ranks.
_LOG_SECTIONS = ("Captured log", "log of rank")


def run(unit: UnitSpec, tests: Sequence[tuple[int, PytestTest]], send: Send) -> bool:
    """Run tests, with their numbers in the unit. Returns whether that came to its end."""
    collection = tests[0][1].collection
    found: list[tuple[int, Any]] = [(number, test.item) for number, test in tests]
    if collection.is_for_listing:
        collection = collection.again(item.nodeid for _, item in found)
        found = _find_again(collection, tests, UnitReports(unit, send))
    if not found:
        return True
    temporary = unit.directory / "tmp"  # pytest makes its folders below this one, which goes with the unit
    temporary.mkdir(exist_ok=True)
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(temporary))
    loop = _Loop(unit, found, send)
    try:
        collection.run([item for _, item in found], loop)
    except BaseException as error:
        if loop.cannot_send is not None:
            raise loop.cannot_send from None
        send(WorkerBroke(explain(error)))
        return False
    loop.report_rest(collection.wants_to_stop)
    if collection.failures_counted and not loop.has_failed:
        loop.reports.fixture_failed("a plugin of pytest has counted a failure that it did not report")
    _finish(collection, loop)
    return True


def _find_again(
    collection: Collection, tests: Sequence[tuple[int, PytestTest]], reports: UnitReports
) -> list[tuple[int, Any]]:
    """The items of a new session. What it lacks, it reports."""
    items = {item.nodeid: item for item in collection.items}
    failures = "\n\n".join(text for _, text in collection.failures) or "its new session has not collected it"
    found = []
    for number, test in tests:
        item = items.get(test.item.nodeid)
        if item is not None:
            found.append((number, item))
        else:
            reports.not_run(number, TestOutcome.ERROR, f"not run: pytest cannot collect it: {failures}")
    return found


def _finish(collection: Collection, loop: _Loop) -> None:
    """End the session. What goes wrong there fails the last test."""
    loop.reports.fixture_began(_END)
    status = pytest.ExitCode.TESTS_FAILED if loop.has_failed else pytest.ExitCode.OK
    try:
        changed = collection.finish(status)
    except BaseException as error:
        loop.reports.fixture_failed(f"{_END}: {explain(error)}")
    else:
        if changed not in (status, pytest.ExitCode.OK):
            loop.reports.fixture_failed(f"{_END}: a hook has changed the exit status to {changed}")
    loop.reports.fixture_ended()


class _Loop:
    """The plugin that runs the tests in place of pytest's own loop, and reports each to run_test.py."""

    def __init__(self, unit: UnitSpec, tests: Sequence[tuple[int, Any]], send: Send):
        self.has_failed = False
        self.cannot_send: BaseException | None = None  # the error
        self.reports = UnitReports(unit, self._send)
        self._tests = tests
        self._to_runner = send
        self._of_test = TestReports()
        self._begun: set[int] = set()

    def _send(self, message: FromWorker) -> None:
        try:
            self._to_runner(message)
        except BaseException as error:
            self.cannot_send = error
            raise

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for place, (number, item) in enumerate(self._tests):
            if session.shouldstop or session.shouldfail:
                break
            following = self._tests[place + 1][1] if place + 1 < len(self._tests) else None
            self._run(number, item, following)
        return True

    def _run(self, number: int, item: Any, following: Any) -> None:
        self._prepare(number, item)
        self._of_test = TestReports()
        self._begun.add(number)
        self.reports.test_began(number)
        stopping.at_test()
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        judged = self._of_test.judge()
        ending = judged[0].verdict or judged[0].ending
        outcome = _OUTCOMES[ending] if ending in _OUTCOMES else TestOutcome(ending.value)
        if COUNTS_AS[outcome] is Category.FAILED:
            self.has_failed = True
            self._print_logs()
        for one in judged:
            self.reports.note_cause(one.cause)
        self.reports.test_ended(number, outcome, _told(judged), judged[0].need)

    def _prepare(self, number: int, item: Any) -> None:
        """Let the test's ranks, if it has any, know what the run knows."""
        item.stash[COMMAND] = command = self.reports.unit.commands[number]
        item.stash[SHOW_COMMAND] = show = self.reports.unit.show_commands[number]
        item.command_of = lambda test: command  # for test cases, whose result object it is
        item.show_command_of = lambda test: show
        seconds = self.reports.unit.timeouts[number]
        if (spec := item.stash.get(SPEC, None)) is not None:
            item.stash[SPEC] = replace(spec, timeout=seconds)
        if getattr(item, "cls", None) is not None:
            with suppress(AttributeError, TypeError):
                setattr(item.cls, TIMEOUT, seconds)

    def _print_logs(self) -> None:
        with suppress(Exception):  # a test may have closed or replaced stderr
            for title, text in self._of_test.sections():
                if title.startswith(_LOG_SECTIONS):
                    print(f"----- {title} -----\n{text.rstrip()}", file=sys.stderr)

    def report_rest(self, stopped: str) -> None:
        """Report that pytest did not run the rest of the tests, or wants to stop after the last one."""
        why = f"pytest was asked to stop: {stopped}" if stopped else ""
        if why:
            self.reports.fixture_failed(why)
        for number, _ in self._tests:
            if number not in self._begun:
                text = f"pytest did not run it{f': {why}' if why else ''}"
                self.reports.not_run(number, TestOutcome.ERROR, text)

    # -- what the other plugins say

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Generator[None, Any, Any]:
        if call.excinfo is not None and not isinstance(getattr(call.excinfo.value, "outcome", None), launch.Outcome):
            stopping.at_failure(call.excinfo.value)
        report = yield
        self._of_test.made(report, call.excinfo.value if call.excinfo is not None else None)
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: Any) -> None:
        self._of_test.add(report)


# Of endings that no outcome is named after.
_OUTCOMES = {
    Ending.XPASSED: TestOutcome.PASSED,
    Ending.UNFINISHED: TestOutcome.ERROR,
    Ending.STRICT_XPASS: TestOutcome.UNEXPECTED_SUCCESS,
}


def _told(judged: Sequence[Judgement]) -> FailureView | str:
    """The failures of a test as one; a text where there is none."""
    if judged[0].ending in (Ending.FAILED, Ending.ERROR):
        return combined([one.view if one.ending in (Ending.FAILED, Ending.ERROR) else _as_text(one) for one in judged])
    return "\n\n".join(map(_text, judged))


def _as_text(judged: Judgement) -> FailureView:
    return FailureView.of_text(_text(judged))


def _text(judged: Judgement) -> str:
    match judged.ending:
        case Ending.STRICT_XPASS | Ending.UNEXPECTED_SUCCESS:
            return f"expected to fail, but passed: {judged.reason}".removesuffix(": ")
        case Ending.XPASSED:
            return f"passed, although it is marked xfail (not strict): {judged.reason}".removesuffix(": ")
        case Ending.FAILED | Ending.ERROR:
            return judged.view.whole
    return judged.text or judged.title or judged.reason
