"""Runs the tests of a unit by pytest, in the worker, and turns the reports of pytest's plugins into outcomes.

A test passes only if pytest has reported that it was set up, called and torn down. All that may be said after that, by
the end of the session, fails the last test.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from torch_testing_ext import launch
from torch_testing_ext._marks.timeouts import ATTRIBUTE as TIMEOUT
from torch_testing_ext._process.logs import cut_middle
from torch_testing_ext._pytest_ranks.internals import text_of
from torch_testing_ext._pytest_ranks.marks import COMMAND, SPEC

from ..model import TestOutcome
from .protocol import Began, Ended, FixtureBegan, FixtureEnded, FixtureFailed, FromWorker, NotRun, WorkerBroke
from .pytest_session import Collection, explain
from .pytest_style import PytestTest
from .result import LONGEST_MESSAGE
from .unit_output import UnitOutput
from .unit_spec import UnitSpec

__rank_frame__ = True

Send = Callable[[FromWorker], None]
_XPASS_STRICT = "[XPASS(strict)]"
_XPASS_OF_UNITTEST = "Unexpected success"
_END = "the end of pytest's session"
# Sections of a report that are not in the log of the process, or in those of its ranks.
_LOG_SECTIONS = ("Captured log", "log of rank")


def run(unit: UnitSpec, tests: Sequence[tuple[int, PytestTest]], send: Send) -> bool:
    """Run tests, with their numbers in the unit. Returns whether that came to its end."""
    collection = tests[0][1].collection
    found: list[tuple[int, Any]] = [(number, test.item) for number, test in tests]
    if collection.is_for_listing:
        collection = collection.again(item.nodeid for _, item in found)
        found = _find_again(collection, tests, send)
    if not found:
        return True
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", _temporary_folder(unit))
    loop = _Loop(unit, found, send)
    try:
        collection.run([item for _, item in found], loop)
    except BaseException as error:
        if loop.cannot_send is not None:
            raise loop.cannot_send from None
        send(WorkerBroke(explain(error), time.monotonic()))
        return False
    loop.report_rest(collection.wants_to_stop)
    if collection.failures_counted and not loop.has_failed:
        send(FixtureFailed("a plugin of pytest has counted a failure that it did not report"))
    _finish(collection, loop, send)
    return True


def _find_again(collection: Collection, tests: Sequence[tuple[int, PytestTest]], send: Send) -> list[tuple[int, Any]]:
    """The items of a new session. What it lacks, it reports."""
    items = {item.nodeid: item for item in collection.items}
    failures = "\n\n".join(text for _, text in collection.failures) or "its new session has not collected it"
    found = []
    for number, test in tests:
        item = items.get(test.item.nodeid)
        if item is not None:
            found.append((number, item))
        else:
            why = f"not run: pytest cannot collect it: {failures}"
            send(NotRun(number, time.monotonic(), TestOutcome.ERROR, why, None))
    return found


def _finish(collection: Collection, loop: _Loop, send: Send) -> None:
    """End the session. What goes wrong there fails the last test."""
    send(FixtureBegan(_END, time.monotonic(), ()))
    status = pytest.ExitCode.TESTS_FAILED if loop.has_failed else pytest.ExitCode.OK
    try:
        changed = collection.finish(status)
    except BaseException as error:
        send(FixtureFailed(cut_middle(f"{_END}: {explain(error)}", LONGEST_MESSAGE)))
    else:
        if changed not in (status, pytest.ExitCode.OK):
            send(FixtureFailed(f"{_END}: a hook has changed the exit status to {changed}"))
    send(FixtureEnded())


class _Loop:
    """The plugin that runs the tests in place of pytest's own loop, and reports each to run_test.py."""

    def __init__(self, unit: UnitSpec, tests: Sequence[tuple[int, Any]], send: Send):
        self.has_failed = False
        self.cannot_send: BaseException | None = None  # the error
        self._unit = unit
        self._tests = tests
        self._to_runner = send
        self._output = UnitOutput(unit)
        self._told = _Told()
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
        self._told = _Told()
        self._begun.add(number)
        self._send(Began(number, time.monotonic(), self._output.length()))
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        outcome, message, want = self._told.judge()
        if outcome not in _NOT_FAILED:
            self.has_failed = True
            self._print_logs()
            if (command := self._unit.commands[number]) not in message:
                message += f"\n\nTo run it alone:\n  {command}"
        message = cut_middle(message, LONGEST_MESSAGE)
        output, ranks = self._output.length(), self._output.new_rank_directories()
        memory = self._output.device_memory()
        self._send(Ended(number, time.monotonic(), outcome, message, want, output, ranks, memory))

    def _prepare(self, number: int, item: Any) -> None:
        """Let the test's ranks, if it has any, know what the run knows."""
        self._output.begin_test()
        item.stash[COMMAND] = command = self._unit.commands[number]
        item.command_of = lambda test: command  # for test cases, whose result object it is
        seconds = self._unit.timeouts[number]
        if (spec := item.stash.get(SPEC, None)) is not None:
            item.stash[SPEC] = replace(spec, timeout=seconds)
        if getattr(item, "cls", None) is not None:
            with suppress(AttributeError, TypeError):
                setattr(item.cls, TIMEOUT, seconds)

    def _print_logs(self) -> None:
        with suppress(Exception):  # a test may have closed or replaced stderr
            for title, text in self._told.logs():
                print(f"----- {title} -----\n{text.rstrip()}", file=sys.stderr)

    def report_rest(self, stopped: str) -> None:
        """Report that pytest did not run the rest of the tests, or wants to stop after the last one."""
        why = f"pytest was asked to stop: {stopped}" if stopped else ""
        if why:
            self._send(FixtureFailed(why))
        for number, _ in self._tests:
            if number not in self._begun:
                text = f"pytest did not run it{f': {why}' if why else ''}"
                self._send(NotRun(number, time.monotonic(), TestOutcome.ERROR, text, None))

    # -- what the other plugins say

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Generator[None, Any, Any]:
        report = yield
        self._told.errors.append((report, call.excinfo.value if call.excinfo is not None else None))
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: Any) -> None:
        self._told.add(report)


_NOT_FAILED = (TestOutcome.PASSED, TestOutcome.SKIPPED, TestOutcome.EXPECTED_FAILURE)
_Judgement = tuple[TestOutcome, str, str | None]  # the outcome, the message, and what a test that skips wants


@dataclass
class _Told:
    """What pytest and its plugins have said of one test. Pure."""

    errors: list[tuple[Any, BaseException | None]] = field(default_factory=list)  # by report
    phases: dict[str, Any] = field(default_factory=dict)  # the latest report of each phase
    problems: list[tuple[TestOutcome, str]] = field(default_factory=list)
    reports: list[Any] = field(default_factory=list)

    def add(self, report: Any) -> None:
        self.reports.append(report)
        if report.failed:
            self.problems.append(self._problem(report))
        if _is_of_part(report):
            return
        self.phases[report.when] = report

    def judge(self) -> _Judgement:
        if self.problems:
            return self.problems[0][0], "\n\n".join(message for _, message in self.problems), None
        setup, call, teardown = (self.phases.get(when) for when in ("setup", "call", "teardown"))
        for report in (setup, call):
            if report is not None and report.skipped and teardown is not None:
                return self._skip(report)
        missing = [when for when, report in (("set-up", setup), ("call", call), ("tear-down", teardown)) if not report]
        if missing:
            return TestOutcome.ERROR, f"pytest reported no result of its {' and its '.join(missing)}", None
        if unknown := sorted({report.outcome for report in self.phases.values() if not _is_known(report)}):
            return TestOutcome.ERROR, f"pytest reported no end of it, only: {', '.join(unknown)}", None
        if (why := getattr(call, "wasxfail", None)) is not None:
            return TestOutcome.PASSED, f"passed, although it is marked xfail (not strict): {why}".rstrip(": "), None
        return TestOutcome.PASSED, "", None

    def logs(self) -> Iterator[tuple[str, str]]:
        sections = (section for report in self.reports for section in report.sections)
        yield from (one for one in dict.fromkeys(sections) if one[0].startswith(_LOG_SECTIONS))

    def _error_of(self, report: Any) -> BaseException | None:
        return next((error for each, error in self.errors if each is report), None)

    def _problem(self, report: Any) -> tuple[TestOutcome, str]:
        text = text_of(report)
        if text.startswith(_XPASS_STRICT):
            reason = text.removeprefix(_XPASS_STRICT).strip()
            return TestOutcome.UNEXPECTED_SUCCESS, f"expected to fail, but passed{f': {reason}' if reason else ''}"
        if text.strip() == _XPASS_OF_UNITTEST:
            return TestOutcome.UNEXPECTED_SUCCESS, "expected to fail, but passed"
        error = self._error_of(report)
        if isinstance(getattr(error, "outcome", None), launch.Outcome):
            return TestOutcome(error.outcome.value), text  # type: ignore[union-attr]
        asserts = error is None or isinstance(error, (AssertionError, pytest.fail.Exception))
        outcome = TestOutcome.FAILED if asserts and report.when == "call" else TestOutcome.ERROR
        return outcome, f"{_WITHIN.get(report.when, '')}{_title(report, error)}\n\n{text}"

    def _skip(self, report: Any) -> _Judgement:
        if (why := getattr(report, "wasxfail", None)) is not None:
            return TestOutcome.EXPECTED_FAILURE, str(why), None
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        want = getattr(self._error_of(report), "want", None)
        return TestOutcome.SKIPPED, str(reason).removeprefix("Skipped: "), want


_WITHIN = {"setup": "in the set-up: ", "teardown": "in the tear-down: "}


def _is_of_part(report: Any) -> bool:
    """Whether a report is that of a subtest."""
    return getattr(report, "context", None) is not None


def _is_known(report: Any) -> bool:
    return report.outcome in ("passed", "failed", "skipped")


def _title(report: Any, error: BaseException | None) -> str:
    """The first line of a message."""
    if isinstance(error, pytest.FixtureLookupError):
        return next(
            (line[1:].strip() for line in report.longreprtext.splitlines() if line.startswith("E ")), str(error)
        )
    if error is not None:
        return launch.summarize(error)
    crash = getattr(report.longrepr, "reprcrash", None)
    said = str(getattr(crash, "message", "") or report.longreprtext)
    return said.strip().partition("\n")[0] or "failed"


def _temporary_folder(unit: UnitSpec) -> str:
    """The folder below which pytest makes its temporary folders; it goes with the unit."""
    folder = Path(unit.directory, "tmp")
    folder.mkdir(exist_ok=True)
    return str(folder)
