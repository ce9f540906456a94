"""Warnings of ranks: recorded in the rank, and raised once more in the process of the test."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from torch_testing_ext.launch.aspect import Aspect
from torch_testing_ext.launch.host_kinds import HostKind

if TYPE_CHECKING:
    from torch_testing_ext.launch.attempts import RankAttempt, RanksEnd


class WarningsOfRanks(Aspect):
    """Raises the warnings of ranks once more, where the test is waited for."""

    name = "warnings"
    gaps = MappingProxyType(
        {
            HostKind.OWN: "such a rank has no account: its warnings are in its output",
            HostKind.THREADS: "threads warn in the process of the test itself",
            HostKind.SCRIPT: "the warnings of a script are in its output",
            HostKind.TORCHRUN: "the warnings of a script are in its output",
        }
    )

    def finish(self, attempt: RankAttempt, end: RanksEnd) -> RanksEnd:
        accounts = [report.account for report in end.reports if report.account is not None]
        # Those of each run of the test, each once.
        new = [warning for account in accounts for warning in account.warnings if warning not in attempt.told]
        attempt.told.update(new)
        if new:
            from torch_testing_ext._tests.outcomes import TestOutcome
            from torch_testing_ext.launch.aspects.rank_warnings import raise_again

            raise_again(new, filtered=attempt.host.has_own_filters and end.verdict.outcome is TestOutcome.PASSED)
        return end


WARNINGS = WarningsOfRanks()
