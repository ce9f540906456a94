"""All that is known of failures, from the journal of a run and from the files that tests keep."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_testing_ext._collectives.failure import FailureView
from torch_testing_ext._process import words
from torch_testing_ext._process.same_texts import warnings_once
from torch_testing_ext._tests import kept_failures
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.runner.model import Attempt, FinishedTest, Policy, Test, TestEnd, TestId
from torch_testing_ext.runner.options import Options, UsageError
from torch_testing_ext.runner.scheduling.selection import Selection

from . import wording
from .failure_data import failure_line
from .journal import JournalError
from .journal_reader import find_journal, read_journal


@dataclass(frozen=True)
class KnownRun:
    """A run with failures: of the runner, or of pytest."""

    # As the user knows it: its command and its time.
    title: str
    # The accounts of tests that have failed in it.
    accounts: dict[TestId, str]
    # The tests that have these, and what counts as a failure.
    failed: dict[TestId, FinishedTest]
    policy: Policy
    at: float


def known_runs(places: Sequence[Path]) -> list[KnownRun]:
    """The runs that journals and folders with a cache know, the latest first."""
    runs = [run for place in places for run in (*_of_journal(place), *_of_kept_reports(place))]
    return sorted(runs, key=lambda run: run.at, reverse=True)


def accounts_of_failures(
    runs: Sequence[KnownRun], names: Sequence[str], root: Path, cwd: Path, *, as_data: bool = False
) -> Iterator[str]:
    """The accounts of all failures in the latest run; or of the tests with these names, each in its latest run.

    `as_data`: as lines of JSON. Raises UsageError for a name that no failed test has.
    """
    shown_as = _shown_as_data if as_data else _shown_as_text
    latest = runs[:1]
    if not names:
        for run in latest:
            yield from shown_as(run, run.accounts)
        return
    shown: set[TestId] = set()
    for name in names:
        found = False
        for run in runs:
            tests = [test for test in _named(name, run.accounts, root, cwd) if test not in shown]
            found = found or bool(tests)
            shown.update(tests)
            yield from shown_as(run, tests)
        if not found and not _named(name, shown, root, cwd):
            raise UsageError(f"show: no failure of {name} is known.{_others(runs)}")


def _others(runs: Sequence[KnownRun]) -> str:
    if not runs:
        return ""
    latest = runs[0]
    failed = words.first_names([wording.test_name(test) for test in latest.accounts]) or "no test"
    return f" In the latest run ({latest.title}), {failed} failed"


def _shown_as_data(run: KnownRun, tests: Iterable[TestId]) -> Iterator[str]:
    """One line of JSON for each failure."""
    yield from (failure_line(run.failed[test], run.policy) for test in tests)


def _shown_as_text(run: KnownRun, tests: Iterable[TestId]) -> Iterator[str]:
    for test in tests:
        name = wording.test_name(test)
        rule = "=" * min(len(name), 80)
        yield f"{name}\n{rule}\nin {run.title}\n\n{run.accounts[test]}\n"


def _title(command: str, at: float) -> str:
    return f"{command}, {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(at))}"


def _of_journal(place: Path) -> Iterator[KnownRun]:
    """The run of a journal."""
    try:
        path = find_journal(place)
        run = read_journal(path)
    except (JournalError, OSError):
        return
    policy = run.header.policy
    accounts = {}
    failed = {}
    for result in run.summary.finished:
        verdicts = {policy.verdict(attempt.outcome) for attempt in result.attempts}
        if TestOutcome.FAILED in verdicts:
            accounts[result.test.id] = "\n\n".join(_account(attempt) for attempt in result.attempts)
            failed[result.test.id] = result
    at = path.stat().st_mtime
    yield KnownRun(_title("torchtest", at), accounts, failed, policy, at)


def _of_kept_reports(place: Path) -> Iterator[KnownRun]:
    """The runs without the runner, by the reports that their tests have kept."""
    by_run: dict[str, list[kept_failures.KeptReport]] = {}
    for report in kept_failures.kept_reports(place):
        by_run.setdefault(report.run, []).append(report)
    for reports in by_run.values():
        at = max(report.at for report in reports)
        accounts = {_id(report.test): report.account for report in reports}
        failed = {}
        for test, account in accounts.items():
            attempt = Attempt(Test(test), TestEnd(TestOutcome.FAILED, failure=FailureView.of_text(account)))
            failed[test] = FinishedTest((attempt,))
        yield KnownRun(_title("pytest", at), accounts, failed, Policy(), at)


def _id(name: str) -> TestId:
    """The id of a test whose name is that of pytest, or of unittest after the file."""
    file, _, inner = name.partition("::")
    cls, _, method = inner.rpartition("::" if "::" in inner else ".")
    if "[" in cls:
        # The separator is in a parameter.
        cls, method = "", inner
    return TestId(file, cls, method)


def _account(attempt: Attempt) -> str:
    took = wording.duration(attempt.seconds)
    parts = [f"{attempt.outcome.value} after {took}, attempt {attempt.number}", wording.account(attempt)]
    for heading, said in wording.logs(attempt):
        parts.append(f"output of {heading}:\n{warnings_once(said)}")
    parts += wording.leftovers(attempt)
    return "\n\n".join(part for part in parts if part)


def _named(name: str, tests: Iterable[TestId], root: Path, cwd: Path) -> list[TestId]:
    """The tests that a name selects for a run; else those whose name ends with it."""
    known = [Test(test) for test in tests]
    files = sorted({test.id.file for test in known})
    try:
        selection = Selection.of(Options(names=(name,)), root, cwd)
        selected = [test.id for test in selection.tests(known, selection.files(files))]
    except UsageError:
        selected = []
    return selected or [test.id for test in known if _ends_with(test.id, wording.one_line(name))]


def _ends_with(test: TestId, name: str) -> bool:
    """Whether a name is that of the test, perhaps without its file or its class."""
    shown = wording.test_name(test)
    spellings = (shown, shown.replace("::", "."))
    return any(spelling == name or spelling.endswith((f"::{name}", f".{name}", f"/{name}")) for spelling in spellings)
