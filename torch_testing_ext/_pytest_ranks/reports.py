"""Judges the reports that pytest and its plugins make of a test, for every process in which pytest runs one. Pure.

A rank judges the report of its own call. The parent of a standalone test and a worker of the runner judge the reports
of all phases, the former without the exceptions, which were raised in another process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from torch_testing_ext import launch
from torch_testing_ext._collectives.failure import FailureView
from torch_testing_ext._process.code_sites import Site
from torch_testing_ext._tests.outcomes import TestOutcome

from .pytest_internals.failure_texts import text_of

_XPASS_STRICT = "[XPASS(strict)]"
_XPASS_OF_UNITTEST = "Unexpected success"
LONGEST_SECTION = 200_000  # characters of output that are added to a report
_PHASES = {"setup": "set-up", "call": "call", "teardown": "tear-down"}


@dataclass(frozen=True)
class Judgement:
    """The meaning of a report."""

    outcome: TestOutcome
    reason: str = ""  # of a skip, and of a mark `xfail`
    title: str = ""  # the first line of a failure
    text: str = ""  # all that the report of a failure shows
    phase: str = ""  # "set-up" or "tear-down", if it failed there
    is_of_ranks: bool = False  # the verdict on ranks has decided
    passed_against_xfail: bool = False  # the test passed, against a mark `xfail`: a failure if the mark is strict
    is_unfinished: bool = False  # a phase has no report, or one that is none of passed, failed and skipped
    need: str | None = None  # which a test that skips has in vain
    cause: launch.Cause = launch.Cause.OWN  # of a failure
    failure: FailureView | None = None  # that the verdict on ranks has
    site: Site | None = None  # the line that raised the exception

    @property
    def view(self) -> FailureView:
        """The failure, of which pytest's text is known if it is not one of ranks."""
        if self.failure is not None:
            return self.failure
        if self.is_of_ranks:
            return FailureView.of_text(self.text or self.title)
        has_title = self.text.partition("\n")[0] == self.title
        text = self.text if has_title else f"{self.title}\n\n{self.text}"
        return FailureView.of_text(f"{_within(self.phase)}{text}", self.site)


# Makes the failure of an exception: with the phase if that is no call, the subtest, and pytest's text.
ViewOfError = Callable[[BaseException, str, str, str], FailureView]


def _within(phase: str) -> str:
    return f"in the {phase}: " if phase else ""


def judge(report: Any, error: BaseException | None = None, view: ViewOfError | None = None) -> Judgement:
    """Judge one report. `error`: the exception that it is of, if this process has it; `view` shows that."""
    if report.failed:
        return _judge_failure(report, error, view)
    if report.skipped and (why := getattr(report, "wasxfail", None)) is not None:
        return Judgement(TestOutcome.EXPECTED_FAILURE, str(why).removeprefix("reason: "))  # as in 7.4
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, (tuple, list)) else report.longreprtext
        return Judgement(TestOutcome.SKIPPED, str(reason).removeprefix("Skipped: "), need=_need_of(error))
    if not report.passed:
        return _unfinished(f"pytest reported no end of it, only: {report.outcome}")
    why = getattr(report, "wasxfail", None)
    return Judgement(TestOutcome.PASSED, "" if why is None else str(why), passed_against_xfail=why is not None)


def _need_of(error: BaseException | None) -> str | None:
    """The accelerators whose lack is the reason for a skip. In tests of unittest, pytest raises its own amid theirs."""
    needs = [getattr(each, "want", None) for each in (error, getattr(error, "__context__", None))]
    return next((need for need in needs if need), None)


def _unfinished(why: str) -> Judgement:
    return Judgement(TestOutcome.ERROR, title=why, is_unfinished=True)


def _judge_failure(report: Any, error: BaseException | None, view: ViewOfError | None) -> Judgement:
    text, title = text_of(report), _title(report, error)
    if text.startswith(_XPASS_STRICT):
        reason = text.removeprefix(_XPASS_STRICT).strip()
        return Judgement(TestOutcome.UNEXPECTED_SUCCESS, reason, title, text, passed_against_xfail=True)
    if text.strip() == _XPASS_OF_UNITTEST:
        return Judgement(TestOutcome.UNEXPECTED_SUCCESS, "", title, text)
    outcome = getattr(error, "outcome", None)
    is_of_ranks = isinstance(outcome, TestOutcome)
    if not isinstance(outcome, TestOutcome):
        asserts = error is None or isinstance(error, (AssertionError, pytest.fail.Exception))
        outcome = TestOutcome.FAILED if asserts and report.when == "call" else TestOutcome.ERROR
    phase = "" if report.when == "call" or getattr(error, "is_refusal", False) else _PHASES.get(report.when, "")
    failure = getattr(error, "failure", None)
    if failure is None and error is not None and view is not None and not is_of_ranks:
        failure = view(error, phase, _subtest(report), text)
    return Judgement(
        outcome,
        "",
        title,
        text,
        phase,
        is_of_ranks,
        cause=launch.cause_in(title) if error is None else launch.cause_of(error),
        failure=failure,
        site=None if error is None else next(iter(launch.sites_of(error)[-1:]), None),
    )


def _title(report: Any, error: BaseException | None) -> str:
    return f"{_subtest(report)}{_own_title(report, error)}"


def _subtest(report: Any) -> str:
    """The subtest that a report is of, with its parameters, before a title; "" for a whole test."""
    context = getattr(report, "context", None)
    if context is None:
        return ""
    parameters = ", ".join(f"{name}={value}" for name, value in getattr(context, "kwargs", {}).items())
    message = f"[{context.msg}] " if getattr(context, "msg", None) else ""
    return f"in subtest {message}({parameters}): "


def _own_title(report: Any, error: BaseException | None) -> str:
    if getattr(error, "is_refusal", False):
        return str(error).partition("\n")[0]
    if error is not None and not isinstance(error, pytest.FixtureLookupError):
        return launch.summarize(error)
    lines = report.longreprtext.splitlines()
    crash = getattr(getattr(report.longrepr, "reprcrash", None), "message", None)
    errors = (line[1:].strip() for line in lines if line.startswith("E "))
    first = str(crash or next(errors, "") or "".join(lines[:1]))
    return first.strip().partition("\n")[0] or "failed"


class TestReports:
    """All reports of one test."""

    __test__ = False  # not a test for pytest to collect

    def __init__(self, view: ViewOfError | None = None) -> None:
        """`view`: for failures that pytest's text does not show best."""
        self._view = view
        self._errors: list[tuple[Any, BaseException | None]] = []  # by report
        self._reports: list[Any] = []
        self._failures: list[Judgement] = []
        self._phases: dict[str, Any] = {}  # the latest report of each

    def made(self, report: Any, error: BaseException | None) -> None:
        """Remember the exception that a report is made of. It is added later, unless a plugin keeps it back."""
        self._errors.append((report, error))

    def add(self, report: Any) -> None:
        """Add a report that pytest gives to all plugins."""
        self._reports.append(report)
        if report.failed:
            self._failures.append(judge(report, self._error_of(report), self._view))
        if getattr(report, "context", None) is None:  # a subtest has one, and is no phase
            self._phases[report.when] = report

    def _error_of(self, report: Any) -> BaseException | None:
        return next((error for each, error in self._errors if each is report), None)

    def judge(self) -> list[Judgement]:
        """Judge the test: every failure, or the one thing that all reports say together."""
        if self._failures:
            return self._failures
        if why := self.missing():
            return [_unfinished(why)]
        judged = {when: judge(report, self._error_of(report)) for when, report in self._phases.items()}
        telling = [judged[when] for when in ("setup", "call") if when in judged and self._phases[when].skipped]
        telling += [judgement for judgement in judged.values() if judgement.is_unfinished]
        return telling[:1] or [judged["call"]]

    def missing(self) -> str:
        """Say which phases have no report; "" if none is missing. After a skip, the call may be."""
        setup, call, teardown = (self._phases.get(when) for when in _PHASES)
        if teardown is not None and any(report is not None and report.skipped for report in (setup, call)):
            return ""
        missing = [name for when, name in _PHASES.items() if when not in self._phases]
        return f"pytest reported no result of its {' and its '.join(missing)}" if missing else ""

    def sections(self) -> Iterator[tuple[str, str]]:
        """The titles and texts of captured output, each once: a report repeats those of earlier phases."""
        yield from dict.fromkeys(section for report in self._reports for section in report.sections)
