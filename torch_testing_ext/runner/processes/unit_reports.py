"""Reports of tests and fixtures that a worker sends, and unittest's suite and result that make them."""

import ast
import functools
import os
import sys
import time
import unittest
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch_testing_ext import fault_points, faults, launch
from torch_testing_ext._collectives.failure import FailureView, combined, take_worlds
from torch_testing_ext._process.logs import cut_middle
from torch_testing_ext._process.notes import take_left_running, take_notes
from torch_testing_ext._testing.bases.unittest_and_pytest import FixtureSuite, prevented
from torch_testing_ext.faults import SweepReport
from torch_testing_ext.launch import Cause, environment, in_rank, own_report, verdict
from torch_testing_ext.launch.judging import view_of_error
from torch_testing_ext.runner.model import COUNTS_AS, Category, DeviceMemory, TestEnd, TestOutcome

from .worker_messages import Began, Ended, FixtureBegan, FixtureEnded, FixtureFailed, FromWorker, NotRun, UnitSpec

# --------------------------------------------------------------------------------------------------------------------
# A worker's reports about the tests and fixtures of its unit, whether unittest or pytest runs them.

# The files of a run have a message of this length whole. Readers of XML refuse texts beyond ten million bytes.
LONGEST_MESSAGE = 4_000_000
# Whole worlds of one test.
_MOST_WORLDS = 4

Send = Callable[[FromWorker], None]


@dataclass
class UnitReports:
    """Reports what begins and ends in the unit that this process runs, with its output so far."""

    unit: UnitSpec
    send: Send
    _ranks_seen: set[str] = field(default_factory=set)
    _port_in_use: bool = False

    def test_began(self, number: int) -> None:
        verdict.forget_memory()
        take_worlds()
        self._port_in_use = False
        self.send(Began(number, time.monotonic(), self._length_of_log()))

    def note_cause(self, cause: Cause) -> None:
        """Note the cause of a failure of the test or fixture that is running."""
        self._port_in_use |= cause is Cause.PORT_IN_USE

    def test_ended(self, number: int, outcome: TestOutcome, ended: FailureView | str, want: str | None) -> None:
        """`ended`: the failure, or a text. A failure names the command that runs the test alone."""
        notes = take_notes()
        memory = verdict.highest([*notes.memory, own_report.memory_of_this_process()])
        if COUNTS_AS[outcome] is Category.FAILED and isinstance(ended, str) and ended:
            ended = FailureView.of_text(ended)
        message, failure = (ended, None) if isinstance(ended, str) else ("", ended)
        if failure is not None and not failure.rerun_command:
            failure = replace(failure, rerun_command=self.unit.commands[number])
        end = TestEnd(
            outcome,
            cut_middle(message, LONGEST_MESSAGE),
            failure and failure.cut(LONGEST_MESSAGE),
            want,
            self._port_in_use,
            memory and DeviceMemory(*memory),
            notes.warnings,
            notes.left_running,
            take_worlds()[:_MOST_WORLDS],
            _sweep_of(notes.sweeps, outcome),
        )
        self.send(Ended(number, time.monotonic(), end, self._length_of_log(), self._new_rank_directories()))

    def not_run(self, number: int, outcome: TestOutcome, told: FailureView | str, want: str | None = None) -> None:
        message, failure = (told, None) if isinstance(told, str) else ("", told)
        self.send(NotRun(number, time.monotonic(), TestEnd(outcome, message, failure, want, self._port_in_use)))

    def fixture_began(self, name: str, needed_by: tuple[int, ...] = ()) -> None:
        """`needed_by`: the tests that cannot run without it."""
        self._port_in_use = False
        self.send(FixtureBegan(name, time.monotonic(), needed_by))

    def fixture_ended(self) -> None:
        self.send(FixtureEnded(take_left_running()))

    def fixture_failed(self, told: FailureView | str) -> None:
        """A tear-down has failed, or anything else after a test."""
        failure = FailureView.of_text(told) if isinstance(told, str) else told
        self.send(FixtureFailed(failure.cut(LONGEST_MESSAGE)))

    def _length_of_log(self) -> int:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # a test may have closed or replaced them: that is no failure
                stream.flush()
        return self.unit.log.stat().st_size

    def _new_rank_directories(self) -> tuple[str, ...]:
        """The directories with the files of the ranks that were started since the last call."""
        new: list[str] = []
        with suppress(FileNotFoundError):  # made by the first test that starts ranks
            new = sorted(set(os.listdir(self.unit.ranks)) - self._ranks_seen)
        self._ranks_seen.update(new)
        return tuple(new)


NO_RANKS = "it has no ranks that a drill can reach: use MultiProcessTestCase, or @pytest.mark.world_size"


def _sweep_of(noted: Sequence[SweepReport], outcome: TestOutcome) -> SweepReport | None:
    """The report on the faults of a test; in a drill with the names in the code, or why it has no faults."""
    is_drill = environment.read_settings().drill is not None
    for report in noted:
        if report.cells:
            # Elsewhere other tests of the file may reach them.
            return replace(report, names=_names_in_code()) if is_drill else report
    if not is_drill or COUNTS_AS[outcome] is not Category.PASSED:
        return None
    return noted[0] if noted else SweepReport(why_not=NO_RANKS)


def _names_in_code() -> tuple[str, ...]:
    """The names that imported modules give to `fault_point` and `reached`, which show what no run has reached."""
    names: set[str] = set()
    sought = (fault_points.fault_point, fault_points.reached, fault_points, faults)
    for module in list(sys.modules.values()):
        content = dict(getattr(module, "__dict__", {}))
        called = frozenset(name for name, value in content.items() if any(value is each for each in sought))
        file = str(content.get("__file__") or "")
        if file.endswith(".py") and str(content.get("__name__")).partition(".")[0] not in _NOT_OF_USERS:
            names.update(_names_given(file, called))
    return tuple(sorted(names))


_NOT_OF_USERS = frozenset({"torch", __name__.partition(".")[0], *sys.stdlib_module_names} - {"__main__"})
_OURS = ("torch_testing_ext", fault_points.__name__, faults.__name__)
_SOUGHT = ("fault_point", "reached", "fault_points", "faults")


@functools.cache
def _names_given(file: str, called: frozenset[str]) -> frozenset[str]:
    """The names that the code of a file gives to these functions, or to those of these modules.

    `called`: the names that the module has for them. Functions may import them, too.
    """
    try:
        source = Path(file).read_bytes()
        if not called and b"torch_testing_ext" not in source:
            return frozenset()
        nodes = list(ast.walk(ast.parse(source)))
    except (OSError, ValueError, SyntaxError):
        return frozenset()
    called |= {name for node in nodes for name in _imported(node)}
    given = set()
    for node in nodes:
        match node:
            case ast.Call(
                ast.Name(name) | ast.Attribute(ast.Name(name), "fault_point" | "reached"),
                [ast.Constant(str() as text), *_],
            ) if name in called:
                given.add(text)
    return frozenset(given)


def _imported(node: ast.AST) -> list[str]:
    """The names by which an import brings these functions or modules."""
    match node:
        case ast.ImportFrom(module, names) if module in _OURS:
            return [each.asname or each.name for each in names if each.name in _SOUGHT]
        case ast.Import(names):
            return [each.asname for each in names if each.asname and each.name in _OURS]
    return []


# --------------------------------------------------------------------------------------------------------------------
# A unittest suite and result that report each test and each fixture as it begins and ends.
#
# Runs in the worker. Combines the calls that unittest makes for one test into one outcome.

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
        # Of the latest set-up: outcome, failure or reason, want.
        self._problems: list[tuple[TestOutcome, FailureView | str, str | None]] = []
        self._number = -1  # of the test that is announced
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
            in_rank.at_test()

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
        if not isinstance(of_ranks, launch.Outcome):
            in_rank.at_failure(err[1])
        self._outcomes.append(TestOutcome(of_ranks.value) if isinstance(of_ranks, launch.Outcome) else outcome)
        self._told.append(self._view_of(test, err, within))
        self._reports.note_cause(launch.cause_of(err[1]))

    def _view_of(self, test: unittest.TestCase, err: Any, within: str = "") -> FailureView:
        """The view of an exception. `within` begins its title."""
        error: BaseException = err[1]
        if isinstance(getattr(error, "outcome", None), launch.Outcome):
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
