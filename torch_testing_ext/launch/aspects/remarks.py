"""Remarks of others about a failure in ranks, such as a run of PyTorch's own files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch_testing_ext.launch.aspect import Aspect

if TYPE_CHECKING:
    from torch_testing_ext.launch.attempts import RankAttempt, RanksEnd
    from torch_testing_ext.launch.rank_reports import RankReport
    from torch_testing_ext.launch.verdict import Expected, Verdict

    # A text about the end of a test; "" for none.
    Remark = Callable[[Sequence[RankReport], Expected, Verdict], str]


class Remarks(Aspect):
    """Adds the remarks of all sources to a verdict."""

    name = "remarks"

    def __init__(self) -> None:
        self._sources: list[Remark] = []

    def add(self, source: Remark) -> None:
        """Have this source asked at the end of each test."""
        self._sources.append(source)

    def finish(self, attempt: RankAttempt, end: RanksEnd) -> RanksEnd:
        for remark in self._sources:
            end = end.with_note(remark(end.reports, attempt.expected, end.verdict))
        return end


REMARKS = Remarks()
