"""The tests that a later run, perhaps elsewhere, has to run: those that no run of a file has passed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.runner.model import TestId

from .reading import paths_of, read_results
from .results import RunResults


@dataclass(frozen=True)
class KnownTests:
    """The tests that run files know."""

    # They have passed, and failed nowhere.
    passed: frozenset[TestId]
    # They have a result, whatever it is.
    ran: frozenset[TestId]

    @classmethod
    def of(cls, all_results: Sequence[RunResults]) -> KnownTests:
        results = [result for run in all_results for result in run.results]
        failed = {result.test for result in results if result.counts_as is TestOutcome.FAILED}
        passed = {result.test for result in results if result.counts_as is TestOutcome.PASSED}
        ran = {result.test for result in results if result.outcome is not TestOutcome.SKIPPED}
        return cls(frozenset(passed - failed), frozenset(ran))


def known_tests(paths: Sequence[Path]) -> KnownTests:
    """The tests that files of results know. Raises BadResults."""
    runs = [results for path in paths_of([str(path) for path in paths]) for results in read_results(path)]
    return KnownTests.of(runs)
