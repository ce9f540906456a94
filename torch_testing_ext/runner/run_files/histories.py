"""The history of a test through many runs."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch_testing_ext._process.words import count
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.runner.model import TestId
from torch_testing_ext.runner.report import wording

from .results import RunResults, TestResult, name_of, require_one_project


@dataclass(frozen=True)
class PastResult:
    """The result of a test in one run."""

    run: RunResults
    result: TestResult


@dataclass(frozen=True)
class TestHistory:
    """The results of one test, the oldest first."""

    __test__ = False  # not a test for pytest to collect

    test: TestId
    past: tuple[PastResult, ...]

    @property
    def ran(self) -> int:
        return sum(each.result.outcome is not TestOutcome.SKIPPED for each in self.past)

    @property
    def failed(self) -> int:
        return sum(each.result.counts_as is TestOutcome.FAILED for each in self.past)

    @property
    def flaky(self) -> int:
        return sum(each.result.outcome is TestOutcome.FLAKY for each in self.past)


def histories(name: str, all_results: Sequence[RunResults]) -> tuple[TestHistory, ...]:
    """The history of each test of this name: its id, or the end or the beginning of it."""
    require_one_project(all_results)
    past: dict[TestId, list[PastResult]] = defaultdict(list)
    for run in sorted(all_results, key=lambda results: results.clock):
        for result in run.results:
            past[result.test].append(PastResult(run, result))
    for is_meant in (_is_name, _ends_with, _begins_with):
        tests = [test for test in past if is_meant(name, test)]
        if tests:
            return tuple(TestHistory(test, tuple(past[test])) for test in tests)
    return ()


def _is_name(name: str, test: TestId) -> bool:
    return name in (str(test), test.method, test.dotted)


def _ends_with(name: str, test: TestId) -> bool:
    return any(str(test).endswith(f"{between}{name}") for between in ("::", "/", ".")) or test.dotted.endswith(
        f".{name}"
    )


def _begins_with(name: str, test: TestId) -> bool:
    return str(test).startswith(name) or test.method.startswith(f"{name}[")


def history_lines(history: TestHistory) -> Iterator[str]:
    """The history in words: a line for each run, and the shares of failures and of passes on a retry."""
    yield name_of(history.test)
    for each in history.past:
        run, result = each.run, each.result
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.clock)) if run.clock else "unknown time"
        took = "" if result.outcome is TestOutcome.SKIPPED else wording.duration(result.seconds)
        facts = "  ".join(fact for fact in (run.machine, run.commit[:10]) if fact)
        why = f"  {result.message}" if result.message else ""
        yield f"  {when:16}  {result.outcome.value:18}  {took:>9}  {facts}{why}"
    runs = count(history.ran, "run")
    yield f"{runs}: {history.failed} failed, {history.flaky} passed on a retry, {_slowest(history)}"


def _slowest(history: TestHistory) -> str:
    took = sorted(each.result.seconds for each in history.past if each.result.outcome is not TestOutcome.SKIPPED)
    if not took:
        return f"skipped in {count(len(history.past), 'run')}"
    return f"median {wording.duration(took[len(took) // 2])}, slowest {wording.duration(took[-1])}"
