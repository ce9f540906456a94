"""The results of a file, whatever has written it: what diff, history and census read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.runner.events import Collected, RunBegan, Stopping
from torch_testing_ext.runner.model import Attempt, FinishedTest, OmittedTest, Policy, Test, TestId
from torch_testing_ext.runner.report.journal_reader import RecordedRun

from .run_file import BadResults, RunFacts


@dataclass(frozen=True)
class TestResult:
    """The result of one test in one run."""

    __test__ = False  # not a test for pytest to collect

    # A result of another runner has a class in dotted form, with its module, and perhaps no file.
    test: TestId
    outcome: TestOutcome
    counts_as: TestOutcome
    seconds: float = 0.0
    # Why it was skipped, or the title of its failure.
    message: str = ""
    line: int = 0
    # The line that skipped it, "file:line", as far as a text of pytest says.
    skipped_at: str = ""
    # What it needs, if no machine had it.
    want: str = ""
    # It ran, but only on fake devices, or without other ranks.
    made_up: str = ""
    # It ran, but nothing was judged: why.
    not_judged: str = ""

    @property
    def was_seen(self) -> bool:
        """Whether the test ran, and something has judged it."""
        return self.outcome is not TestOutcome.SKIPPED and not self.made_up and not self.not_judged


@dataclass(frozen=True)
class RunResults:
    """The results of one run on one machine."""

    name: str
    results: tuple[TestResult, ...]
    machine: str = ""
    # Seconds since the epoch; 0 if the file does not say.
    clock: float = 0.0
    commit: str = ""
    command: str = ""
    project: str = ""
    shard: str = ""
    # Collected, with what has left them out.
    left_out: tuple[OmittedTest, ...] = ()
    # Collected, but the run ended before.
    unfinished: tuple[TestId, ...] = ()
    why_unfinished: str = ""
    # Whether another runner has written it, whose names are not ours.
    is_foreign: bool = False
    bodies: Mapping[str, str] = field(default_factory=dict)
    # Shards that its merge did not have.
    missing: tuple[str, ...] = ()
    digest: str = ""


def results_of_run(name: str, facts: RunFacts, recorded: RecordedRun, missing: tuple[str, ...] = ()) -> RunResults:
    began = next(event for event in recorded.events if isinstance(event, RunBegan))
    left_out: tuple[OmittedTest, ...] = ()
    stopped = ""
    for event in recorded.events:
        match event:
            case Collected():
                left_out = event.left_out
            case Stopping(reason):
                stopped = reason
    summary = recorded.summary
    policy = recorded.header.policy
    return RunResults(
        name,
        tuple(_result(finished, policy, began.fake) for finished in summary.finished),
        began.header.host,
        began.clock,
        began.header.commit,
        began.header.command,
        facts.project,
        facts.shard,
        left_out,
        tuple(test.id for test in summary.unfinished),
        stopped or ("the run was interrupted" if summary.interrupted else ""),
        bodies=facts.bodies,
        missing=missing,
        digest=facts.digest,
    )


def _result(finished: FinishedTest, policy: Policy, fake: bool) -> TestResult:
    last = finished.last
    shown = last if finished.outcome is not TestOutcome.FLAKY else finished.attempts[0]
    return TestResult(
        finished.test.id,
        finished.outcome,
        policy.verdict_on(finished),
        last.seconds,
        shown.title,
        finished.test.line,
        want=last.end.want or "",
        made_up=_made_up(finished.test, last, fake),
        not_judged=_not_judged(last),
    )


def _made_up(test: Test, attempt: Attempt, fake: bool) -> str:
    if fake and test.devices:
        return "ran only on fake devices"
    worlds = [view.size for view in attempt.end.worlds]
    return f"ran only as a world of {max(worlds)} ranks that do not communicate" if worlds else ""


NOT_RUN_BY_PYTEST = "[NOTRUN]"


def _not_judged(attempt: Attempt) -> str:
    if NOT_RUN_BY_PYTEST in attempt.message:
        return "xfail(run=False)"
    lines = [line for view in attempt.end.worlds for line in view.not_judged]
    return f"not judged: {lines[0]}" if lines else ""


def passed_in(runs: Iterable[RunResults]) -> frozenset[TestId]:
    """The tests that ran and passed in these runs, and failed in none."""
    results = [result for run in runs for result in run.results]
    passed = {result.test for result in results if result.was_seen and result.counts_as is TestOutcome.PASSED}
    return frozenset(passed - {result.test for result in results if result.counts_as is TestOutcome.FAILED})


def name_of(test: TestId) -> str:
    return str(test).replace("\n", "\\n").replace("\r", "\\r")


def require_one_project(all_results: Sequence[RunResults]) -> None:
    """Raises BadResults if files are of different projects."""
    projects: dict[str, str] = {}
    for results in all_results:
        if results.project:
            projects.setdefault(results.project, results.name)
    if len(projects) > 1:
        (one, first), (other, second), *_ = projects.items()
        raise BadResults(f"{first} is of the project {one}, {second} of {other}: name files of one project")
