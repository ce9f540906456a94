"""Leftovers: the processes that the ranks of a test have left running."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import MappingProxyType
from typing import TYPE_CHECKING

from torch_testing_ext.launch.aspect import Aspect
from torch_testing_ext.launch.host_kinds import HostKind

if TYPE_CHECKING:
    from torch_testing_ext.launch.attempts import RankAttempt, RanksEnd
    from torch_testing_ext.launch.rank_reports import RankReport


def print_leftovers(name: str, reports: Iterable[RankReport]) -> None:
    """Name the processes that ranks have left running although the test passed."""
    for report in reports:
        if report.leftovers:
            left = "; ".join(report.leftovers)
            print(f"{name}: rank {report.rank} left running (now terminated): {left}", file=sys.stderr)


class Leftovers(Aspect):
    """Names the processes that the ranks of a passing test have left running."""

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
        from torch_testing_ext._tests.outcomes import TestOutcome

        if end.verdict.outcome is TestOutcome.PASSED:
            print_leftovers(attempt.plan.case.name, end.reports)
        return end


LEFTOVERS = Leftovers()
