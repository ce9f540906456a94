"""The log of a unit: what its processes reported, and what each test came to after all its attempts."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch_testing_ext._collectives.failure import FailureView, combined
from torch_testing_ext._process.ends import describe_exit
from torch_testing_ext._process.messages import unexpected
from torch_testing_ext.runner.model import (
    COUNTS_AS,
    Attempt,
    AttemptEnded,
    Category,
    Event,
    FinishedTest,
    Summary,
    Test,
    TestEnd,
    TestFinished,
    TestId,
    TestOutcome,
    Unit,
    Warned,
)
from torch_testing_ext.runner.options import Options
from torch_testing_ext.runner.processes import worker_messages

# --------------------------------------------------------------------------------------------------------------------
# The attempts of all tests of a run, what follows from each (a retry or a final result), and what is reported of
# them.
#
# It knows no process, file or clock.

# A test and its repetition.
Key = tuple[TestId, int]

# As torch and the system write it: for processes that a test starts itself, of which only the output is known.
_IN_USE = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)


class Results:
    """Takes the attempts of a run: decides which tests run again, and has the run stopped when enough have failed."""

    def __init__(self, options: Options, report: Callable[[Event], object], stop: Callable[[str], object]):
        # Final results that count as failures.
        self.failures = 0
        self._options = options
        self._policy = options.policy
        self._report = report
        self._stop = stop
        # Tests that run again while no other test runs.
        self._alone: set[Key] = set()
        self._attempts: dict[Key, list[Attempt]] = {}
        self._finished: dict[Key, FinishedTest] = {}
        # With their repetition.
        self._unfinished: list[tuple[Test, int]] = []
        # Attempts that a node was lost with, and how.
        self._lost: dict[tuple[TestId, int, int], str] = {}
        self._warnings: list[str] = []
        # Texts of warnings of tests.
        self._shown: set[str] = set()

    def warn(self, text: str) -> None:
        self._warnings.append(text)
        self._report(Warned(text))

    def take(self, attempt: Attempt, may_retry: bool) -> bool:
        """Take an attempt that has ended into account. Returns whether the test is to be retried."""
        self._attempts.setdefault(_key(attempt), []).append(attempt)
        failed = self._policy.verdict(attempt.outcome) is Category.FAILED
        retry = may_retry and failed and self._runs_again(attempt)
        self._report(AttemptEnded(attempt, retry))
        if not retry:
            self._finish(attempt)
        return retry

    def _runs_again(self, attempt: Attempt) -> bool:
        """Another test may have caused the failure: then this one runs again, once, whatever --retries says."""
        key = _key(attempt)
        why = why_to_run_alone(attempt)
        if why and key not in self._alone:
            self._alone.add(key)
            self.warn(f"{attempt.test.id}: {why}")
            return True
        return attempt.number <= self._options.retries

    def _finish(self, attempt: Attempt) -> None:
        """Make the attempts of a test its final result, of which this is the last."""
        key = _key(attempt)
        finished = FinishedTest(tuple(self._attempts[key]))
        self._finished[key] = finished
        self._report(TestFinished(finished))
        if self._policy.verdict_on(finished) is Category.FAILED:
            self.failures += 1
        else:
            # The output of this test is not shown.
            self._show_warnings(finished.last)
        most = 1 if self._options.endless else self._options.maxfail
        if most is not None and self.failures >= most:
            tests = "test" if self.failures == 1 else "tests"
            self._stop(f"{self.failures} {tests} failed")

    def _show_warnings(self, attempt: Attempt) -> None:
        """Show each warning once: workers have the same ones."""
        for warning in attempt.end.warnings:
            if warning.text not in self._shown:
                self._shown.add(warning.text)
                self.warn(str(warning))

    def must_be_alone(self, tests: Iterable[Test], repetition: int) -> bool:
        return any((test.id, repetition) in self._alone for test in tests)

    def lose(self, unit: Unit, tests: Sequence[Test], why: str) -> tuple[tuple[Test, ...], list[tuple[Test, str]]]:
        """A node was lost with tests of a unit that had no result.

        Returns the tests that run again, as the same attempt, and those that have been lost before, with a message.
        """
        lost_once: list[Test] = []
        lost_twice: list[tuple[Test, str]] = []
        for test in tests:
            key = (test.id, unit.repetition, unit.attempt)
            before = self._lost.get(key)
            if before is None:
                self._lost[key] = why
                lost_once.append(test)
            else:
                message = f"it lost its node twice: first, {before}; then, {why}"
                lost_twice.append((test, message))
        if lost_once:
            runs = "runs" if len(lost_once) == 1 else f"and {len(lost_once) - 1} more run"
            self.warn(f"{why}: {lost_once[0].id} {runs} again, as the same attempt")
        return tuple(lost_once), lost_twice

    def leave(self, unit: Unit, tests: Sequence[Test]) -> None:
        """Note tests that do not run, or run no further, since the run ends."""
        self._unfinished += [(test, unit.repetition) for test in tests]

    def leave_all(self, units: Iterable[Unit]) -> None:
        """Note units of which no test has a result, since the run ends."""
        for unit in units:
            self.leave(unit, unit.tests)

    def summary(self, seconds: float, interrupted: bool, error: str) -> Summary:
        """End the run: a test that was to be retried has failed."""
        for key, attempts in self._attempts.items():
            if key not in self._finished:
                self._finish(attempts[-1])
        # Once, although several of its repetitions may be left.
        unfinished: dict[Test, None] = {}
        for test, repetition in self._unfinished:
            if (test.id, repetition) not in self._finished:
                unfinished[test] = None
        return Summary(
            tuple(self._finished.values()),
            seconds,
            self._policy,
            interrupted,
            tuple(unfinished),
            tuple(self._warnings),
            error,
        )


def _key(attempt: Attempt) -> Key:
    return attempt.test.id, attempt.repetition


def why_to_run_alone(attempt: Attempt) -> str:
    """The way in which another test may have caused this failure; empty if none can."""
    if attempt.end.port_in_use or _says_in_use(attempt):
        return "a port was in use (EADDRINUSE); the test runs again alone"
    if attempt.evicted:
        return (
            f"it was terminated because node {attempt.lease.node} was short of memory, which other tests used too; "
            "it runs again alone"
        )
    return ""


def _says_in_use(attempt: Attempt) -> bool:
    if _IN_USE.search(attempt.output):
        return True
    return any(_IN_USE.search(log.output) for log in attempt.ranks)


# --------------------------------------------------------------------------------------------------------------------
# Finds the outcome of each test of a unit from its worker's reports and how the worker ended.
#
# A log grows by `add` and counts the results that `certain` has handed out; `finish` changes nothing. It knows no
# process, file or clock.


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
    fixture: worker_messages.FixtureBegan | None = None  # the class or module fixture that is running
    aftermath: Aftermath = field(default_factory=dict)
    leftovers: dict[int | None, tuple[str, ...]] = field(default_factory=dict)  # of ranks, after each test
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
            case worker_messages.PreloadModules():
                pass  # for the process of the file
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
        """Did the worker end after everything was over, and as it should? The exit code alone would not show it."""
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
        # Those that it left running are added below, if it has passed otherwise.
        end = replace(ended.end, leftovers=())
        result = self._result(test, end, began.at, ended.at)
        result = replace(result, log=(began.printed, ended.printed), ranks=ended.ranks)
        result = _with_leftovers(result, (*ended.end.leftovers, *self.leftovers.get(test, ())))
        return _with_aftermath(result, aftermath.get(test, ()))

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
            return [self._ended_within(self.running, end)]
        if self.fixture is not None and (needed := [test for test in self._rest([]) if test in self.fixture.tests]):
            return self._prevented(needed, self.fixture.name, self.fixture.at, end)
        return []

    def _aftermath_of(self, end: WorkerExit) -> Aftermath:
        """The aftermath with the end of the worker: it came in a tear-down, or while nothing was running."""
        if self._latest is None and not self.all_over:
            return self.aftermath
        return _with_failure(self.aftermath, self._latest, self._explain_after(end))

    def _ended_within(self, test: int, end: WorkerExit) -> AttemptResult:
        began = self.began[test]
        seconds, name = end.at - began.at, self.names[test]
        outcome, title = self._explain(end, seconds, name)
        # For a line that names the test already.
        _, reason = self._explain(end, seconds, name, says_where=False)
        failure = self._with_details(title, end, test)
        result = self._result(test, TestEnd(outcome, failure=failure), began.at, end.at, reason)
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
        match end.cause:
            case EndCause.DEADLINE if what is None:
                return TestOutcome.TIMEOUT, "its process did not end; it was terminated"
            case EndCause.DEADLINE:
                when = f"{what} timed out after {seconds:.1f} s" if what else f"timed out after {seconds:.1f} s,{into}"
                return TestOutcome.TIMEOUT, f"{when}; it was terminated"
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
        is_evicted = end.evicted and COUNTS_AS[outcome] is Category.FAILED
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
    if COUNTS_AS[attempt.outcome] is Category.FAILED:
        first = attempt.failure or FailureView.of_text(attempt.message)
        return result.with_end(message="", failure=first.with_later(later))
    return result.with_end(outcome=failures[0][0], message="", failure=combined(later))
