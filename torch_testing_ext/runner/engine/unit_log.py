"""Finds the outcome of each test of a unit from its worker's reports and how the worker ended. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from torch_testing_ext._process.exits import describe_exit
from torch_testing_ext._process.messages import unexpected

from ..model import COUNTS_AS, Category, TestOutcome, Unit
from ..processes.protocol import Began, Ended, FixtureFailed, FromWorker, Missing, PreloadHints, WorkerBroke


class EndCause(enum.Enum):
    """Why a unit's worker ended."""

    ITSELF = "it ended by itself"
    DEADLINE = "it timed out"
    INTERRUPTED = "the run was interrupted"
    LOST = "the process that watched it died"
    NOT_STARTED = "it could not be started"


@dataclass(frozen=True)
class WorkerExit:
    """How a unit's worker ended."""

    cause: EndCause
    at: float
    code: int | None = None  # negative for a signal; None if unknown
    leftovers: tuple[str, ...] = ()
    stacks: str = ""  # where it was, if known
    lost: str = ""  # how the process that watched it died, or why it was not started


@dataclass(frozen=True)
class AttemptResult:
    """How one test of a unit ended. Times are those of time.monotonic()."""

    test: int
    outcome: TestOutcome
    message: str = ""
    began: float = 0.0
    ended: float = 0.0
    want: str | None = None
    log: tuple[int, int | None] = (0, None)  # its part of the worker's log
    ranks: tuple[str, ...] = ()  # directories of its ranks' files
    leftovers: tuple[str, ...] = ()


@dataclass
class UnitLog:
    """Everything that a unit's worker has reported so far."""

    unit: Unit
    names: tuple[str, ...]
    commands: tuple[str, ...]
    began: dict[int, Began] = field(default_factory=dict)
    ended: dict[int, Ended] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    fixtures: list[FixtureFailed] = field(default_factory=list)  # class and module fixtures that failed, or skip
    broke: str = ""
    _given: int = 0  # how many results have been handed out

    @property
    def running(self) -> int | None:
        """The test that is running."""
        return next((test for test in self.began if test not in self.ended), None)

    def add(self, message: FromWorker) -> None:
        """Add a report of the worker."""
        match message:
            case Began(test):
                self.began[test] = message
            case Ended(test):
                self.ended[test] = message
            case Missing(test):
                self.missing.append(test)
            case FixtureFailed():
                self.fixtures.append(message)
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
        last = self.running is None and not self.missing
        certain = ended[self._given : len(ended) - last]
        self._given += len(certain)
        return [self._reported(test) for test in certain]

    def finish(self, end: WorkerExit) -> tuple[list[AttemptResult], list[int]]:
        """The results that have not been handed out yet, and the tests that have not been run yet."""
        results = [self._reported(test) for test in list(self.ended)[self._given :]]
        results += self._cut_short(end)
        results += [self._missing(test, end) for test in self.missing]
        seen = {*self.ended, *self.began, *self.missing}
        rest = [test for test in range(len(self.names)) if test not in seen]
        if rest and end.cause is not EndCause.INTERRUPTED:
            not_run = self._not_run(rest, end, alone=not seen)
            results += not_run
            rest = rest[len(not_run) :]
        return self._with_aftermath(results, end), rest

    def _reported(self, test: int) -> AttemptResult:
        began, ended = self.began[test], self.ended[test]
        return AttemptResult(
            test,
            ended.outcome,
            ended.message,
            began.at,
            ended.at,
            ended.want,
            (began.printed, ended.printed),
            ended.ranks,
        )

    def _cut_short(self, end: WorkerExit) -> Iterator[AttemptResult]:
        """The result of the test during which the worker ended."""
        test = self.running
        if test is None or end.cause is EndCause.INTERRUPTED:
            return
        began = self.began[test]
        outcome, message = self._explain(test, end, end.at - began.at)
        yield AttemptResult(test, outcome, message, began.at, end.at, log=(began.printed, None))

    def _explain(self, test: int, end: WorkerExit, seconds: float) -> tuple[TestOutcome, str]:
        into = f"{seconds:.1f} s into {self.names[test]}"
        match end.cause:
            case EndCause.DEADLINE:
                outcome, title = (
                    TestOutcome.TIMEOUT,
                    f"{self.names[test]} timed out after {seconds:.1f} s; it was terminated",
                )
            case EndCause.LOST:
                outcome, title = TestOutcome.CRASHED, f"it was terminated {into}, because {end.lost}"
            case _ if self.broke:
                outcome, title = TestOutcome.ERROR, self.broke
            case _:
                outcome, title = TestOutcome.CRASHED, f"the test's process {describe_exit(end.code)} {into}"
        parts = [title]
        if end.stacks:
            parts.append(f"stacks, most recent call first:\n{end.stacks.rstrip()}")
        return outcome, "\n\n".join([*parts, f"To run it alone:\n  {self.commands[test]}"])

    def _missing(self, test: int, end: WorkerExit) -> AttemptResult:
        message = f"{self.names[test]} was listed, but does not exist when the file is imported again"
        return AttemptResult(test, TestOutcome.ERROR, message, end.at, end.at)

    def _not_run(self, rest: list[int], end: WorkerExit, alone: bool) -> list[AttemptResult]:
        """Results of tests that did not begin: a class fixture prevented them, or the worker died."""
        if end.cause is EndCause.NOT_STARTED:
            message = f"it was not run: {end.lost}"
            return [AttemptResult(test, TestOutcome.ERROR, message, end.at, end.at) for test in rest]
        exited = end.code == 0 and end.cause is EndCause.ITSELF
        if exited and self.fixtures:
            return [self._prevented(test, self.fixtures[0], end) for test in rest]
        if exited:
            return [AttemptResult(test, TestOutcome.ERROR, "unittest did not run it", end.at, end.at) for test in rest]
        if not alone:
            return []  # another process may get further
        outcome, message = self._explain(rest[0], end, 0.0)
        return [AttemptResult(rest[0], outcome, f"before its first test: {message}", end.at, end.at)]

    def _prevented(self, test: int, fixture: FixtureFailed, end: WorkerExit) -> AttemptResult:
        outcome = TestOutcome.SKIPPED if fixture.skipped else TestOutcome.ERROR
        return AttemptResult(test, outcome, fixture.message, end.at, end.at, fixture.want)

    def _with_aftermath(self, results: list[AttemptResult], end: WorkerExit) -> list[AttemptResult]:
        """Attribute failures after the last test to it."""
        if not results:
            return results
        *others, last = results
        ran = last.test in self.began
        if ran and self.fixtures and _is_good(last):
            last = replace(last, outcome=TestOutcome.ERROR, message=f"after the test: {self.fixtures[-1].message}")
        elif ran and _is_good(last) and end.cause is EndCause.ITSELF and end.code != 0:
            how = f"after the test its process {describe_exit(end.code)}\n\n{end.stacks}".rstrip()
            last = replace(last, outcome=TestOutcome.CRASHED, message=how)
        elif ran and end.leftovers and last.outcome is TestOutcome.PASSED and end.cause is EndCause.ITSELF:
            left = "\n".join(f"  {name}" for name in end.leftovers)
            last = replace(last, outcome=TestOutcome.LEAKED, message=f"left running (now terminated):\n{left}")
        return [*others, replace(last, leftovers=end.leftovers)]


def _is_good(result: AttemptResult) -> bool:
    return COUNTS_AS[result.outcome] is not Category.FAILED
