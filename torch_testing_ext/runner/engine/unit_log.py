"""The log of a unit: what its processes reported, and how each of its tests ended.

A log grows by `add` and counts the results that `certain` has handed out; `finish` changes nothing. It knows no
process, file or clock.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch_testing_ext._collectives.failure import FailureView, combined
from torch_testing_ext._process.ends import SIGTERM_DID_NOT_END_IT, describe_exit
from torch_testing_ext._process.messages import unexpected
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.runner.model import Attempt, TestEnd, Unit
from torch_testing_ext.runner.processes import fork_parent_messages, worker_messages


class EndCause(enum.Enum):
    """Why a unit's worker ended."""

    ITSELF = "it ended by itself"
    DEADLINE = "it timed out"
    INTERRUPTED = "the run was interrupted"
    LOST = "the process that watched it died"
    MEMORY = "the memory of its node was nearly used up"
    NOT_STARTED = "it could not be started"


@dataclass(frozen=True)
class WorkerExit:
    """The end of a unit's worker."""

    cause: EndCause
    at: float
    code: int | None = None  # negative for a signal; None if unknown
    leftovers: tuple[str, ...] = ()
    stacks: str = ""  # where it was, if known
    lost: str = ""  # how the process that watched it died, or why it was not started, or was ended
    evicted: bool = False  # ended because memory was short, of which other units had some


@dataclass(frozen=True)
class AttemptResult:
    """The end of one test of a unit, without its output. Times are those of time.monotonic()."""

    test: int
    attempt: Attempt
    log: tuple[int, int | None] = (0, None)  # its part of the worker's log
    ranks: tuple[str, ...] = ()  # directories of its ranks' files

    def with_end(self, **changes: Any) -> AttemptResult:
        """The result with other fields of its end."""
        return self.with_attempt(end=replace(self.attempt.end, **changes))

    def with_attempt(self, **changes: Any) -> AttemptResult:
        """The result with other fields of its attempt."""
        return replace(self, attempt=replace(self.attempt, **changes))


Failure = tuple[TestOutcome, FailureView]
# What went wrong after each test, in its tear-down or at the worker's end. None: after no test, or after one whose
# result has been handed out; the last test of the unit gets that.
Aftermath = dict[int | None, tuple[Failure, ...]]


@dataclass
class UnitLog:
    """Everything that a unit's worker has reported so far."""

    unit: Unit
    names: tuple[str, ...]
    commands: tuple[str, ...]
    started: float = 0.0
    began: dict[int, worker_messages.Began] = field(default_factory=dict)
    ended: dict[int, worker_messages.Ended] = field(default_factory=dict)
    not_run: dict[int, worker_messages.NotRun] = field(default_factory=dict)
    # The failures of tests before their tear-down.
    failed_so_far: dict[int, TestEnd] = field(default_factory=dict)
    fixture: worker_messages.FixtureBegan | None = None  # the class or module fixture that is running
    # The stacks of tests that were still running at their deadline.
    overdue: dict[int, str] = field(default_factory=dict)
    aftermath: Aftermath = field(default_factory=dict)
    leftovers: dict[int | None, tuple[str, ...]] = field(
        default_factory=dict
    )  # what ranks left running after each test
    all_over: bool = False
    broke: str = ""
    _given: int = 0  # how many results of `ended` have been handed out

    @property
    def running(self) -> int | None:
        return next((test for test in self.began if test not in self.ended), None)

    @property
    def _latest(self) -> int | None:
        """The test that ended last, if its result can still change."""
        return next(reversed(self.ended), None) if len(self.ended) > self._given else None

    def add(self, message: worker_messages.FromWorker) -> None:
        match message:
            case worker_messages.Began(test):
                self.began[test] = message
            case worker_messages.FailedSoFar(test, end):
                self.failed_so_far[test] = end
            case worker_messages.Ended(test):
                self.ended[test] = message
            case worker_messages.NotRun(test):
                self.not_run[test] = message
            case worker_messages.FixtureBegan():
                self.fixture = message
            case worker_messages.FixtureEnded(left):
                self.fixture = None
                self._note_leftovers(left)
            case worker_messages.FixtureFailed(failure):
                self.aftermath = _with_failure(self.aftermath, self._latest, (TestOutcome.ERROR, failure))
            case worker_messages.AllOver(left):
                self.all_over = True
                self._note_leftovers(left)
            case worker_messages.WorkerBroke(text):
                self.broke = text
            case fork_parent_messages.PreloadModules():
                pass  # the process of the file takes it
            case _:
                unexpected(message)

    def _note_leftovers(self, left: tuple[str, ...]) -> None:
        """Ranks that outlived their test, as those of a class do, have left these running."""
        if left:
            self.leftovers[self._latest] = (*self.leftovers.get(self._latest, ()), *left)

    def certain(self) -> list[AttemptResult]:
        """New results that are final.

        Failures after the last test may still change its result: a tearDownClass that fails, a process left running.
        """
        ended = list(self.ended)
        last = self.running is None
        certain = ended[self._given : len(ended) - last]
        self._given += len(certain)
        return [self._reported(test, self.aftermath) for test in certain]

    def finish(self, end: WorkerExit) -> tuple[list[AttemptResult], list[int]]:
        """The results that have not been handed out yet, and the tests that have not been run yet."""
        if end.cause is EndCause.INTERRUPTED:
            results = self._so_far(self.aftermath)
            return results, self._rest(results)
        if end.cause is EndCause.NOT_STARTED and self.running is not None:
            # The preloaded server's end was reported first: the unit had started, and died with it.
            end = replace(end, cause=EndCause.LOST, lost=f"the process that watched it was lost: {end.lost}")
        if end.cause is EndCause.NOT_STARTED:
            results = self._so_far(self.aftermath)
            results += [self._not_run(test, f"it was not run: {end.lost}", end) for test in self._rest(results)]
            return self._with_end(results, self.aftermath, end), []
        in_order = self._ended_in_order(end)
        cut_short = [] if in_order else self._cut_short(end)
        aftermath = self.aftermath if in_order or cut_short else self._aftermath_of(end)
        results = self._so_far(aftermath) + cut_short
        if self.all_over:
            results += [self._not_run(test, "unittest did not run it", end) for test in self._rest(results)]
        elif not results and (rest := self._rest(results)):
            # Another process may get further; but each new unit must have fewer tests.
            results = self._prevented(rest, "", self.started, end)
        return self._with_end(results, aftermath, end), self._rest(results)

    def _ended_in_order(self, end: WorkerExit) -> bool:
        """Whether the worker ended after everything was over, and as it should: its exit code does not tell."""
        in_order = end.cause in (EndCause.ITSELF, EndCause.MEMORY) and end.code == 0
        return self.all_over and (end.cause is EndCause.LOST or in_order)

    def _so_far(self, aftermath: Aftermath) -> list[AttemptResult]:
        """Results of tests that are over, as far as they have not been handed out."""
        return [
            *(self._result(left_out.test, left_out.end, left_out.at) for left_out in self.not_run.values()),
            *(self._reported(test, aftermath) for test in list(self.ended)[self._given :]),
        ]

    def _rest(self, results: list[AttemptResult]) -> list[int]:
        """The tests without a result."""
        known = {*self.ended, *self.began, *self.not_run, *(result.test for result in results)}
        return [test for test in range(len(self.names)) if test not in known]

    def _reported(self, test: int, aftermath: Aftermath) -> AttemptResult:
        began, ended = self.began[test], self.ended[test]
        # The processes that it left running are added below, if it has passed otherwise.
        end = replace(ended.end, leftovers=())
        if test in self.overdue and end.outcome.counts_as is TestOutcome.PASSED:
            end = self._passed_too_late(test, end, ended.at - began.at)
        result = self._result(test, end, began.at, ended.at)
        result = replace(result, log=(began.printed, ended.printed), ranks=ended.ranks)
        result = _with_leftovers(result, (*ended.end.leftovers, *self.leftovers.get(test, ())))
        return _with_aftermath(result, aftermath.get(test, ()))

    def _passed_too_late(self, test: int, end: TestEnd, seconds: float) -> TestEnd:
        """The end of a test that has passed after its deadline: the request for its stacks may have woken it."""
        title = f"{self.names[test]} timed out after {seconds:.1f} s; it ended when its stacks were taken"
        at_deadline = WorkerExit(EndCause.DEADLINE, 0.0, stacks=self.overdue[test])
        return replace(end, outcome=TestOutcome.TIMEOUT, failure=self._with_details(title, at_deadline, test))

    def _result(
        self, test: int, end: TestEnd, began: float, ended: float | None = None, reason: str = ""
    ) -> AttemptResult:
        """The result of a test. `ended`: if it has begun at all."""
        seconds = 0.0 if ended is None else max(0.0, ended - began)
        unit = self.unit
        attempt = Attempt(unit.tests[test], end, seconds, began, unit.repetition, unit.attempt, reason=reason)
        return AttemptResult(test, attempt)

    def _not_run(self, test: int, why: str, end: WorkerExit) -> AttemptResult:
        return self._result(test, TestEnd(TestOutcome.ERROR, failure=FailureView.of_text(why)), end.at)

    # -- a worker that did not end properly

    def _cut_short(self, end: WorkerExit) -> list[AttemptResult]:
        """The results of tests that the end of the worker has failed: the running one, or those of a set-up."""
        if self.running is not None:
            return [self._ended_within(self.running, end), *self._waiting_for_fixture(self.running, end)]
        if self.fixture is not None and (needed := [test for test in self._rest([]) if test in self.fixture.tests]):
            return self._prevented(needed, self.fixture.name, self.fixture.at, end)
        return []

    def _waiting_for_fixture(self, running: int, end: WorkerExit) -> list[AttemptResult]:
        """The results of tests that would wait for the same fixture that the running one has waited for in vain."""
        if self.fixture is None or end.cause is not EndCause.DEADLINE:
            return []
        _, title = self._explain(end, end.at - self.fixture.at, self.fixture.name)
        why = f"not run: {title} (see {self.names[running]})"
        return [self._not_run(test, why, end) for test in self._rest([]) if test in self.fixture.tests]

    def _aftermath_of(self, end: WorkerExit) -> Aftermath:
        """The aftermath with the end of the worker: it came in a tear-down, or while nothing was running."""
        if self._latest is None and not self.all_over:
            return self.aftermath
        return _with_failure(self.aftermath, self._latest, self._explain_after(end))

    def _ended_within(self, test: int, end: WorkerExit) -> AttemptResult:
        began = self.began[test]
        seconds, name = end.at - began.at, self.names[test]
        if self.fixture is not None:
            seconds, name = end.at - self.fixture.at, self.fixture.name
        outcome, title = self._explain(end, seconds, name)
        # The reason is for a line that names the test already.
        _, reason = self._explain(end, seconds, name, says_where=False)
        failure = self._with_details(title, end, test)
        so_far = self.failed_so_far.get(test)
        if so_far is None:
            test_end = TestEnd(outcome, failure=failure)
        else:
            first = so_far.failure or FailureView.of_text(so_far.message)
            test_end = replace(so_far, failure=first.with_later([failure.in_fixture("after the test")]))
            reason = ""
        result = self._result(test, test_end, began.at, end.at, reason)
        return replace(result, log=(began.printed, None))

    def _prevented(self, tests: list[int], what: str, began: float, end: WorkerExit) -> list[AttemptResult]:
        """The worker ended before these tests could begin: the first has the failure.

        After a time-out the others count as failed, too: each of them would wait for the same again.
        """
        first, *others = tests
        outcome, title = self._explain(end, end.at - began, what)
        failure = self._with_details(title, end, first)
        failed = self._result(first, TestEnd(outcome, failure=failure), began, end.at)
        why = f"not run: {title} (see {self.names[first]})"
        hung = end.cause is EndCause.DEADLINE
        return [failed, *(self._not_run(test, why, end) for test in others if hung)]

    def _explain(
        self, end: WorkerExit, seconds: float = 0.0, what: str | None = None, says_where: bool = True
    ) -> tuple[TestOutcome, str]:
        """The outcome and the title for a worker that has ended so many seconds into a test or fixture.

        `what`: "" before its first test; None in no test or fixture. `says_where`: the title says that.
        """
        it, process = ("its process", "its process") if what is None else ("it", "the test's process")
        into = ""
        if what is not None and says_where:
            into = f" {seconds:.1f} s into {what}" if what else " before its first test"
        terminated = SIGTERM_DID_NOT_END_IT if end.code == -signal.SIGKILL else "it was terminated"
        match end.cause:
            case EndCause.DEADLINE if what is None:
                return TestOutcome.TIMEOUT, f"its process did not end; {terminated}"
            case EndCause.DEADLINE:
                when = f"{what} timed out after {seconds:.1f} s" if what else f"timed out after {seconds:.1f} s,{into}"
                return TestOutcome.TIMEOUT, f"{when}; {terminated}"
            case EndCause.LOST:
                return TestOutcome.CRASHED, f"{it} was terminated{into}, because {end.lost}"
            case EndCause.MEMORY:
                return TestOutcome.CRASHED, f"{it} was terminated{into}: {end.lost}"
            case _ if self.broke:
                is_said = what is None or what in self.names
                return TestOutcome.ERROR, self.broke if is_said else f"{what or into.strip()}: {self.broke}"
            case _:
                return TestOutcome.CRASHED, f"{process} {describe_exit(end.code)}{into}"

    def _explain_after(self, end: WorkerExit) -> Failure:
        """Explains, as `_explain` does, a worker that ended within a tear-down, or while nothing was running."""
        fixture = self.fixture
        within = (end.at - fixture.at, fixture.name) if fixture is not None else ()
        outcome, title = self._explain(end, *within)
        return outcome, self._with_details(title, end, self._latest)

    def _with_details(self, title: str, end: WorkerExit, test: int | None) -> FailureView:
        stacks = f"\n\nstacks, most recent call first:\n{end.stacks.rstrip()}" if end.stacks.strip() else ""
        return FailureView.of_text(f"{title}{stacks}", rerun_command=self.commands[test] if test is not None else "")

    # -- any end

    def _with_end(self, results: list[AttemptResult], aftermath: Aftermath, end: WorkerExit) -> list[AttemptResult]:
        """Attribute to the last test what belongs to no other: failures before the first, processes left running."""
        if not results:
            return results
        *others, last = results
        last = _with_aftermath(last, aftermath.get(None, ()))
        last = _with_leftovers(last, self.leftovers.get(None, ()))
        if end.cause is EndCause.ITSELF:
            last = _with_leftovers(last, end.leftovers)
        outcome = last.attempt.outcome
        left = last.attempt.end.leftovers if outcome is TestOutcome.LEAKED else end.leftovers
        is_evicted = end.evicted and outcome.is_failure
        return [*others, last.with_end(leftovers=left).with_attempt(evicted=is_evicted)]


def _with_failure(aftermath: Aftermath, test: int | None, failure: Failure) -> Aftermath:
    return {**aftermath, test: (*aftermath.get(test, ()), failure)}


def _with_leftovers(result: AttemptResult, left: tuple[str, ...]) -> AttemptResult:
    """A result with processes that its test left running: if it has passed otherwise, it has leaked."""
    if not left or result.attempt.outcome not in (TestOutcome.PASSED, TestOutcome.LEAKED):
        return result  # the message of ranks that failed names what they left
    left = (*result.attempt.end.leftovers, *left)
    message = f"left running (now terminated): {'; '.join(left)}"
    return result.with_end(outcome=TestOutcome.LEAKED, message=message, leftovers=left)


def _with_aftermath(result: AttemptResult, failures: Sequence[Failure]) -> AttemptResult:
    """A result with what went wrong after its test, with the output of that."""
    if not failures:
        return result
    later = [failure.in_fixture("after the test") for _, failure in failures]
    result = replace(result, log=(result.log[0], None))
    attempt = result.attempt
    if attempt.outcome.is_failure:
        first = attempt.failure or FailureView.of_text(attempt.message)
        return result.with_end(message="", failure=first.with_later(later))
    return result.with_end(outcome=failures[0][0], message="", failure=combined(later))
