"""The evidence on which a test is judged: what is known about its ranks when they have ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch_testing_ext._collectives.records.raw_records import RawRecord
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.launch.rank_reports import RankReport, add_recorders
from torch_testing_ext.launch.verdict import Case, Expected, Verdict, nothing_to_judge

if TYPE_CHECKING:
    from torch_testing_ext._collectives.findings.finding import Finding
    from torch_testing_ext.launch.logs_of_ranks import Logs


@dataclass(frozen=True)
class RankEvidence:
    """The reports of all ranks of a test, and what else its verdict depends on."""

    reports: tuple[RankReport, ...]
    timed_out: bool = False
    expected: Expected = field(default_factory=Expected)
    # About the collectives: the ranks were ended for it.
    finding: Finding | None = None
    # What must be known to run the test again.
    note: str = ""

    def verdict(self, case: Case) -> Verdict:
        """Judge the test."""
        is_certain = self.finding is None and not self.timed_out
        if is_certain and nothing_to_judge(self.reports, self.expected):
            return Verdict(TestOutcome.PASSED)
        from torch_testing_ext.launch.judging import judge

        note = "\n\n".join(filter(None, (case.note, self.note)))
        return judge(self.reports, self.timed_out, replace(case, note=note), self.expected, self.finding)


def with_collectives(
    reports: Sequence[RankReport], logs: Logs | None, left: Sequence[RawRecord | None]
) -> list[RankReport]:
    """The reports with the collectives of the ranks: from the logs of ranks that are sanitized, and what each has left.

    The logs are removed: nothing more is to be read.
    """
    if logs:
        reports = logs.complete(reports)
        logs.remove()
    return add_recorders(reports, left)
