"""Growth: what a test communicates in a larger world, where it says by which law that may grow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from torch_testing_ext._process.declarations import Setting, number
from torch_testing_ext.launch.aspect import Aspect
from torch_testing_ext.launch.host_kinds import HostKind

if TYPE_CHECKING:
    from torch_testing_ext.launch.attempts import RankAttempt, RanksEnd
    from torch_testing_ext.launch.rank_reports import RankReport

# In the ranks of the larger world: after so many claims, they have said all that is asked.
CLAIMS: Setting[int | None] = Setting("_TORCH_TESTING_EXT_GROWTH", "a number of claims", number, None)
_TIMES = 2
# The reason for a host that never runs in a world.
_OF_SPAWN = "a function that a test spawns does not run there: mark the test with world_size"
_ADVICE = "Call grows() before assertions that hold in one world size alone."


@dataclass
class _Larger:
    """The run of a test in a larger world."""

    reports: Sequence[RankReport] = field(default_factory=tuple)


class GrowthOfTests(Aspect):
    """Runs a test that claims a law of growth once more, as a whole world of twice the size."""

    name = "growth"
    is_always_on = False
    follows_claims = True
    gaps = MappingProxyType(
        {
            HostKind.OWN: "such a rank has no account, in which it could claim a law",
            HostKind.THREADS: "threads share the calls of their process",
            HostKind.SCRIPT: "a script decides itself what its processes do",
            HostKind.TORCHRUN: "a script decides itself what its processes do",
            HostKind.LAUNCHED: "the launcher has started the ranks",
        }
    )
    settings = (CLAIMS,)

    def finish(self, attempt: RankAttempt, end: RanksEnd) -> RanksEnd:
        from dataclasses import replace

        from torch_testing_ext._collectives.records.growth_laws import largest_of, why_not_kept
        from torch_testing_ext._tests.outcomes import TestOutcome
        from torch_testing_ext.launch.verdict import Verdict

        if isinstance(attempt.variation, _Larger):
            attempt.variation.reports = end.reports
            return end
        claimed = [report.claims for report in end.reports]
        if not attempt.is_first or end.verdict.outcome is not TestOutcome.PASSED:
            return end
        size = attempt.plan.world_size
        most = max(map(len, claimed))
        larger, why = _in_larger_world(attempt, most)
        small, large = largest_of(claimed), largest_of(report.claims for report in larger)
        if not why and small.keys() != large.keys():
            ends = [report.summary for report in larger if len(report.claims) < most and report.summary]
            why = f"{next(iter(ends), 'the test claims something else there')}\n{_ADVICE}"
        if why:
            text = f"the growth cannot be told in a world of {size * _TIMES} ranks: {why}"
            return replace(end, verdict=Verdict(TestOutcome.ERROR, text))
        text = why_not_kept(small, size, large, size * _TIMES)
        return replace(end, verdict=Verdict(TestOutcome.FAILED, text)) if text else end


def _in_larger_world(attempt: RankAttempt, claims: int) -> tuple[Sequence[RankReport], str]:
    """Run the test in a larger world. Returns the reports of its ranks, or why it cannot run there."""
    import unittest
    from dataclasses import replace

    from torch_testing_ext._process.temporary_variables import changed_environment
    from torch_testing_ext.launch.aspects.world import SIZE, WORLD
    from torch_testing_ext.launch.attempts import DeviceNeed
    from torch_testing_ext.launch.most_ranks import too_many_in_world

    plan, variation = attempt.plan, _Larger()
    size = plan.world_size * _TIMES
    if why := too_many_in_world(size):
        return (), why
    plan = replace(plan, world_size=size, nodes=plan.nodes * _TIMES, devices=DeviceNeed(), faults=None, kinds=())
    with changed_environment(**{SIZE.name: str(size), CLAIMS.name: str(claims)}):
        try:
            host = attempt.host.in_world(size)
            if host.kind is not HostKind.WORLD:
                return (), WORLD.gaps.get(host.kind, _OF_SPAWN)
            assert attempt.run_also is not None
            attempt.run_also(host, plan, variation)
        except unittest.SkipTest as skip:
            return (), str(skip)
    return variation.reports, ""


GROWTH = GrowthOfTests()
