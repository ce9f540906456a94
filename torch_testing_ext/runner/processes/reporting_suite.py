"""A suite and a result of unittest that report each test and each fixture as it begins and ends.

Runs in the worker. Combines the calls that unittest makes for one test into one outcome.
"""

import sys
import unittest
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch_testing_ext import launch
from torch_testing_ext._collectives.failure import FailureView, combined
from torch_testing_ext._testing.bases.fixture_suites import FixtureSuite, prevented
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.launch import rank_stops
from torch_testing_ext.launch.failure_views import view_of_error

from .unit_reports import Send, UnitReports
from .unit_spec import UnitSpec

__unittest = True  # keeps these frames out of unittest's tracebacks

# If one test has several outcomes, the first of these counts; any other outcome comes before all of these.
_GRAVEST_FIRST = (TestOutcome.UNEXPECTED_SUCCESS, TestOutcome.EXPECTED_FAILURE, TestOutcome.SKIPPED, TestOutcome.PASSED)


class ReportingSuite(FixtureSuite):
    """Announces each test to a ReportingResult, and reports when fixtures run and which tests they prevent.

    Neither the ids of tests nor the objects tell them apart: a suite may have the same test twice.
    """

    _cleanup = False  # keep the tests, which are not in the list that the base class clears

    def __init__(self, tests: Sequence[tuple[int, Any]], announce: Callable[[int, Any], object]):
        """`tests`: with their numbers in the unit."""
        super().__init__()
        self._numbered = tests
        self._announce = announce

    def __iter__(self) -> Iterator[Any]:
        for number, test in self._numbered:
            self._announce(number, test)
            yield test

    def fixture_began(self, name: str, owner: Any, result: Any) -> None:
        result.fixture_began(name, owner)

    def fixture_ended(self, name: str, result: Any) -> None:
        result.fixture_ended()

    def _handleClassSetUp(self, test: Any, result: Any) -> None:
        super()._handleClassSetUp(test, result)
        if prevented(test, result):
            result.not_run(test)


class ReportingResult(unittest.TestResult):
    """Reports the beginning and the end of each fixture, and of each test, which `expect` announces.

    A test may report several runs of itself, or runs of others: all of them are runs of the announced test.
    """

    def __init__(self, unit: UnitSpec, tests: Sequence[tuple[int, Any]], send: Send):
        """`tests`: with their numbers in the unit."""
        super().__init__()
        self._reports = UnitReports(unit, send)
        self._tests = tests
        self._sets_up = False  # the fixture that is running is a set-up
        # The problems of the latest set-up: outcome, failure or reason, want.
        self._problems: list[tuple[TestOutcome, FailureView | str, str | None]] = []
        self._number = -1  # the number of the test that is announced
        self._test: Any = None
        self._has_begun = False
        self._depth = 0  # how many runs have begun and not ended
        self._reported = 0  # how many outcomes had been reported when the run began
        self._outcomes: list[TestOutcome] = []
        self._told: list[FailureView | str] = []  # failures, and reasons of skips
        self._want: str | None = None

    def command_of(self, test: unittest.TestCase) -> str:
        return self._reports.unit.commands[self._number]

    def show_command_of(self, test: unittest.TestCase) -> str:
        """The command that shows the account of a test's failure."""
        return self._reports.unit.show_commands[self._number]

    def expect(self, number: int, test: Any) -> None:
        """Announce the test that runs next."""
        self._number, self._test, self._has_begun, self._depth = number, test, False, 0
        self._outcomes, self._told, self._want = [], [], None

    def not_run(self, test: unittest.TestCase) -> None:
        """unittest leaves out a test; the latest set-up is the reason."""
        left_out = (TestOutcome.ERROR, "unittest did not run it: its set-up has probably failed", None)
        failed = [problem for problem in self._problems if problem[0] is not TestOutcome.SKIPPED]
        outcome, told, want = [*failed, *self._problems, left_out][0]
        self._reports.not_run(self._number, outcome, told, want)

    # -- class and module fixtures

    def fixture_began(self, name: str, owner: Any) -> None:
        self._sets_up = name.startswith("setUp")
        needed_by: tuple[int, ...] = ()
        if self._sets_up:
            self._problems = []
            needed_by = tuple(number for number, test in self._tests if owner in (type(test), type(test).__module__))
        self._reports.fixture_began(name, needed_by)

    def fixture_ended(self) -> None:
        self._sets_up = False
        self._reports.fixture_ended()

    # -- one test, from its beginning to its end

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._depth += 1
        if self._depth == 1:
            self._reported = len(self._outcomes)
        if not self._has_begun:
            self._has_begun = True
            self._reports.test_began(self._number)
            rank_stops.at_test()

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        self._depth -= 1
        if self._depth > 0:
            return
        if len(self._outcomes) == self._reported and sys.exc_info()[1] is not None:
            self._failed(test, sys.exc_info(), TestOutcome.ERROR)  # KeyboardInterrupt: unittest does not catch it
        self._reports.test_ended(self._number, self._outcome(), _all_of(self._told), self._want)

    def _outcome(self) -> TestOutcome:
        if len(self._outcomes) == self._reported:
            self._outcomes.append(TestOutcome.ERROR)
            self._told.append("unittest did not report how this test ended")
        grave = [outcome for outcome in self._outcomes if outcome not in _GRAVEST_FIRST]
        return grave[0] if grave else min(self._outcomes, key=_GRAVEST_FIRST.index)

    # -- calls by unittest

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._outcomes.append(TestOutcome.PASSED)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._failed(test, err, TestOutcome.FAILED)

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        if self._is_fixture(test):
            self._reports.note_cause(launch.cause_of(err[1]))
            failure = self._view_of(test, err).in_fixture(test.id())
            if self._sets_up:
                self._problems.append((TestOutcome.ERROR, failure, None))
            else:
                self._reports.fixture_failed(failure)
            return
        self._failed(test, err, TestOutcome.ERROR)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        # unittest passes only the text of the exception, but calls this while it handles it.
        want = getattr(sys.exc_info()[1], "want", None)
        if self._is_fixture(test):
            if self._sets_up:  # a tear-down that skips skips nothing: its tests are over
                self._problems.append((TestOutcome.SKIPPED, reason, want))
            return
        self._outcomes.append(TestOutcome.SKIPPED)
        self._told.append(reason)
        self._want = want

    def addExpectedFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._outcomes.append(TestOutcome.EXPECTED_FAILURE)
        self._told.append(launch.summarize(err[1]))

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        self._outcomes.append(TestOutcome.UNEXPECTED_SUCCESS)
        self._told.append("expected to fail, but passed")

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        if err is None:
            return
        failed, params = issubclass(err[0], test.failureException), subtest._subDescription()  # type: ignore[attr-defined]
        self._failed(test, err, TestOutcome.FAILED if failed else TestOutcome.ERROR, f"in subtest {params}: ")

    def _is_fixture(self, test: Any) -> bool:
        """Whether a class or module fixture, in place of a test, reports its end."""
        return self._depth == 0 and test is not self._test

    def _failed(self, test: unittest.TestCase, err: Any, outcome: TestOutcome, within: str = "") -> None:
        of_ranks = getattr(err[1], "outcome", None)
        if not isinstance(of_ranks, TestOutcome):
            rank_stops.at_failure(err[1])
        self._outcomes.append(of_ranks if isinstance(of_ranks, TestOutcome) else outcome)
        self._told.append(self._view_of(test, err, within))
        self._reports.note_cause(launch.cause_of(err[1]))

    def _view_of(self, test: unittest.TestCase, err: Any, within: str = "") -> FailureView:
        """The view of an exception. `within` begins its title."""
        error: BaseException = err[1]
        if isinstance(getattr(error, "outcome", None), TestOutcome):
            failure = getattr(error, "failure", None)
            if isinstance(failure, FailureView):
                return failure.titled(f"{within}{failure.title}")
            # It says all that is known.
            return FailureView.of_text(f"{within}{error}")
        traceback = self._exc_info_to_string(err, test)  # type: ignore[attr-defined]
        case = launch.Case("", self.command_of(test), "", "", self.show_command_of(test))
        return view_of_error(error, case, within, traceback.rstrip())


def _all_of(told: list[FailureView | str]) -> FailureView | str:
    """All that is told of one test: one failure for several, if there are any."""
    if not any(isinstance(one, FailureView) for one in told):
        return "\n\n".join(str(one) for one in told)
    return combined([one if isinstance(one, FailureView) else FailureView.of_text(one) for one in told])
