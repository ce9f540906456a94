"""Finds the outcome of each test of a unit from its worker's reports and how the worker ended.

A log grows by `add` and counts the results that `certain` has handed out; `finish` changes nothing. It knows no
process, file or clock.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch_testing_ext._process.messages import unexpected
from torch_testing_ext._process.reaping import describe_exit
from torch_testing_ext._process.user_warnings import KitWarning

from ..model import COUNTS_AS, Category, DeviceMemory, TestOutcome, Unit
from ..processes.worker_messages import (
    AllOver,
    Began,
    Ended,
    FixtureBegan,
    FixtureEnded,
    FixtureFailed,
    FromWorker,
    Missing,
    NotRun,
    PreloadHints,
    WorkerBroke,
)


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
    """The end of one test of a unit. Times are those of time.monotonic()."""

    test: int
    outcome: TestOutcome
    message: str = ""
    began: float = 0.0
    ended: float = 0.0
    want: str | None = None
    log: tuple[int, int | None] = (0, None)  # its part of the worker's log
    ranks: tuple[str, ...] = ()  # directories of its ranks' files
    leftovers: tuple[str, ...] = ()
    memory: DeviceMemory | None = None
    warnings: tuple[KitWarning, ...] = ()
    evicted: bool = False
    port_in_use: bool = False


Failure = tuple[TestOutcome, str]
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
    began: dict[int, Began] = field(default_factory=dict)
    ended: dict[int, Ended] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    not_run: dict[int, NotRun] = field(default_factory=dict)
    fixture: FixtureBegan | None = None  # the class or module fixture that is running
    aftermath: Aftermath = field(default_factory=dict)
    all_over: bool = False
    broke: str = ""
    _given: int = 0  # how many results of `ended` have been handed out

    @property
    def running(self) -> int | None:
        """The test that is running."""
        return next((test for test in self.began if test not in self.ended), None)

    @property
    def _latest(self) -> int | None:
        """The test that ended last, if its result can still change."""
        return next(reversed(self.ended), None) if len(self.ended) > self._given else None

    def add(self, message: FromWorker) -> None:
        """Add a report of the worker."""
        match message:
            case Began(test):
                self.began[test] = message
            case Ended(test):
                self.ended[test] = message
            case Missing(test):
                self.missing.append(test)
            case NotRun(test):
                self.not_run[test] = message
            case FixtureBegan():
                self.fixture = message
            case FixtureEnded():
                self.fixture = None
            case FixtureFailed(text):
                self.aftermath = _with_failure(self.aftermath, self._latest, (TestOutcome.ERROR, text))
            case AllOver():
                self.all_over = True
            case WorkerBroke(text):
                self.broke = text
            case PreloadHints():
                pass  # for the process of the file
            case _:
                unexpected(message)

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
            results = self._so_far(end, self.aftermath)
            return results, self._rest(results)
        if end.cause is EndCause.NOT_STARTED and self.running is not None:
            # The zygote's end was reported first: the unit had started, and died with it.
            end = replace(end, cause=EndCause.LOST, lost=f"the process that watched it was lost: {end.lost}")
        if end.cause is EndCause.NOT_STARTED:
            results = self._so_far(end, self.aftermath)
            results += [_not_run(test, f"it was not run: {end.lost}", end) for test in self._rest(results)]
            return self._with_end(results, self.aftermath, end), []
        in_order = self._ended_in_order(end)
        cut_short = [] if in_order else self._cut_short(end)
        aftermath = self.aftermath if in_order or cut_short else self._aftermath_of(end)
        results = self._so_far(end, aftermath) + cut_short
        if self.all_over:
            results += [_not_run(test, "unittest did not run it", end) for test in self._rest(results)]
        elif not results and (rest := self._rest(results)):
            # Another process may get further; but each new unit must have fewer tests.
            results = self._prevented(rest, "", self.started, end)
        return self._with_end(results, aftermath, end), self._rest(results)

    def _ended_in_order(self, end: WorkerExit) -> bool:
        """Did the worker end after everything was over, and as it should? The exit code alone would not show it."""
        in_order = end.cause in (EndCause.ITSELF, EndCause.MEMORY) and end.code == 0
        return self.all_over and (end.cause is EndCause.LOST or in_order)

    def _so_far(self, end: WorkerExit, aftermath: Aftermath) -> list[AttemptResult]:
        """Results of tests that are over, as far as they have not been handed out."""
        gone = "was listed, but does not exist when the file is imported again"
        return [
            *(_not_run(test, f"{self.names[test]} {gone}", end) for test in self.missing),
            *(_left_out(one) for one in self.not_run.values()),
            *(self._reported(test, aftermath) for test in list(self.ended)[self._given :]),
        ]

    def _rest(self, results: list[AttemptResult]) -> list[int]:
        """The tests without a result."""
        known = {*self.ended, *self.began, *self.missing, *self.not_run, *(result.test for result in results)}
        return [test for test in range(len(self.names)) if test not in known]

    def _reported(self, test: int, aftermath: Aftermath) -> AttemptResult:
        began, ended = self.began[test], self.ended[test]
        result = AttemptResult(
            test,
            ended.outcome,
            ended.message,
            began.at,
            ended.at,
            ended.want,
            (began.printed, ended.printed),
            ended.ranks,
            memory=ended.memory,
            warnings=ended.warnings,
            port_in_use=ended.port_in_use,
        )
        return _with_aftermath(result, aftermath.get(test, ()))

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
        outcome, title = self._explain(self.names[test], end, end.at - began.at)
        message = self._with_details(title, end, test)
        return AttemptResult(test, outcome, message, began.at, end.at, log=(began.printed, None))

    def _prevented(self, tests: list[int], what: str, began: float, end: WorkerExit) -> list[AttemptResult]:
        """The worker ended before these tests could begin: the first has the failure.

        After a time-out the others count as failed, too: each of them would wait for the same again.
        """
        first, *others = tests
        outcome, title = self._explain(what, end, end.at - began)
        failed = AttemptResult(first, outcome, self._with_details(title, end, first), began, end.at)
        why = f"not run: {title} (see {self.names[first]})"
        hung = end.cause is EndCause.DEADLINE
        return [failed, *(_not_run(test, why, end) for test in others if hung)]

    def _explain(self, what: str, end: WorkerExit, seconds: float) -> tuple[TestOutcome, str]:
        """The outcome and the title for a worker that ended within a test or fixture; "": before its first test."""
        into = f"{seconds:.1f} s into {what}" if what else "before its first test"
        match end.cause:
            case EndCause.DEADLINE:
                when = f"{what} timed out after {seconds:.1f} s" if what else f"timed out after {seconds:.1f} s, {into}"
                return TestOutcome.TIMEOUT, f"{when}; it was terminated"
            case EndCause.LOST:
                return TestOutcome.CRASHED, f"it was terminated {into}, because {end.lost}"
            case EndCause.MEMORY:
                return TestOutcome.CRASHED, f"it was ended {into}: {end.lost}"
            case _ if self.broke:
                return TestOutcome.ERROR, self.broke if what in self.names else f"{what or into}: {self.broke}"
            case _:
                return TestOutcome.CRASHED, f"the test's process {describe_exit(end.code)} {into}"

    def _explain_after(self, end: WorkerExit) -> tuple[TestOutcome, str]:
        """Explains, as `_explain` does, a worker that ended within a tear-down, or while nothing was running."""
        if self.fixture is not None:
            outcome, title = self._explain(self.fixture.name, end, end.at - self.fixture.at)
        else:
            outcome, title = self._explain_end(end)
        return outcome, self._with_details(title, end, self._latest)

    def _explain_end(self, end: WorkerExit) -> tuple[TestOutcome, str]:
        match end.cause:
            case EndCause.DEADLINE:
                return TestOutcome.TIMEOUT, "its process did not end; it was terminated"
            case EndCause.LOST:
                return TestOutcome.CRASHED, f"its process was terminated, because {end.lost}"
            case EndCause.MEMORY:
                return TestOutcome.CRASHED, f"its process was ended: {end.lost}"
            case _ if self.broke:
                return TestOutcome.ERROR, self.broke
            case _:
                return TestOutcome.CRASHED, f"its process {describe_exit(end.code)}"

    def _with_details(self, title: str, end: WorkerExit, test: int | None) -> str:
        stacks = f"stacks, most recent call first:\n{end.stacks.rstrip()}" if end.stacks.strip() else ""
        alone = f"To run it alone:\n  {self.commands[test]}" if test is not None else ""
        return "\n\n".join(part for part in (title, stacks, alone) if part)

    # -- any end

    def _with_end(self, results: list[AttemptResult], aftermath: Aftermath, end: WorkerExit) -> list[AttemptResult]:
        """Attribute to the last test what belongs to no other: failures before the first, processes left running."""
        if not results:
            return results
        *others, last = results
        last = _with_aftermath(last, aftermath.get(None, ()))
        if end.leftovers and last.outcome is TestOutcome.PASSED and end.cause is EndCause.ITSELF:
            left = "\n".join(f"  {name}" for name in end.leftovers)
            last = replace(last, outcome=TestOutcome.LEAKED, message=f"left running (now terminated):\n{left}")
        evicted = end.evicted and COUNTS_AS[last.outcome] is Category.FAILED
        return [*others, replace(last, leftovers=end.leftovers, evicted=evicted)]


def _not_run(test: int, why: str, end: WorkerExit) -> AttemptResult:
    return AttemptResult(test, TestOutcome.ERROR, why, end.at, end.at)


def _left_out(one: NotRun) -> AttemptResult:
    return AttemptResult(one.test, one.outcome, one.message, one.at, one.at, one.want, port_in_use=one.port_in_use)


def _with_failure(aftermath: Aftermath, test: int | None, failure: Failure) -> Aftermath:
    return {**aftermath, test: (*aftermath.get(test, ()), failure)}


def _with_aftermath(result: AttemptResult, failures: Sequence[Failure]) -> AttemptResult:
    """A result with what went wrong after its test, with the output of that."""
    if not failures:
        return result
    text = "\n\n".join(f"after the test: {message}" for _, message in failures)
    log = (result.log[0], None)
    if COUNTS_AS[result.outcome] is Category.FAILED:
        return replace(result, message=f"{result.message}\n\n{text}", log=log)
    return replace(result, outcome=failures[0][0], message=text, log=log)
