"""Leftovers: the processes that the ranks of a test have left running."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import MappingProxyType
from typing import TYPE_CHECKING

from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.launch.attempts import Aspect, HostKind, RanksEnd
from torch_testing_ext.launch.rank_reports import RankReport

if TYPE_CHECKING:
    from torch_testing_ext.launch.attempts import RankAttempt


def print_leftovers(name: str, reports: Iterable[RankReport]) -> None:
    """Name the processes that ranks have left running although the test passed."""
    for report in reports:
        if report.leftovers:
            left = "; ".join(report.leftovers)
            print(f"{name}: rank {report.rank} left running (now terminated): {left}", file=sys.stderr)


class Leftovers(Aspect):
    """Names what the ranks of a test that passed have left running."""

    name = "leftovers"
    gaps = MappingProxyType(
        {
            HostKind.OWN: "processes that the class has started are no children of ours",
            HostKind.THREADS: "what a thread starts belongs to the process of all",
            HostKind.TORCHRUN: "torchrun starts the ranks, and says nothing of what they leave",
            HostKind.LAUNCHED: "the launcher starts the ranks, and says nothing of what they leave",
        }
    )

    def finish(self, attempt: RankAttempt, end: RanksEnd) -> RanksEnd:
        if attempt.is_first and end.verdict.outcome is TestOutcome.PASSED:
            print_leftovers(attempt.plan.case.name, end.reports)
        return end


LEFTOVERS = Leftovers()
