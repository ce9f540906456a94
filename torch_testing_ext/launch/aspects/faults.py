"""Faults that a test plans for its ranks: which hosts can have them, and how they reach the ranks."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from torch_testing_ext._process import notes
from torch_testing_ext.faults import FaultPlan, Sweep, SweepReport
from torch_testing_ext.launch.attempts import Aspect, HostKind

if TYPE_CHECKING:
    from torch_testing_ext.launch.attempts import Host, RankAttempt, TestPlan
    from torch_testing_ext.launch.environment import Settings


class Faults(Aspect):
    """Has the faults of a test happen in its ranks."""

    name = "faults"
    gaps = MappingProxyType(
        {
            HostKind.THREADS: "its ranks are threads, of which none can die alone: use MultiProcessTestCase",
            HostKind.OWN: "its class starts its ranks itself: remove its _start_processes",
            HostKind.LAUNCHED: "a launcher has started the ranks, and ends all with one: run the test without it",
            HostKind.WORLD: "has faults, of which ranks without communication learn nothing",
        }
    )

    def check(self, host: Host, plan: TestPlan, settings: Settings) -> TestPlan:
        why = self.gaps.get(host.kind)
        if why is None and isinstance(plan.faults, FaultPlan) and plan.faults.restarts and host.kind is HostKind.KEPT:
            why = f"restart({plan.faults.restarts[0]}) needs ranks of its own for each test"
        if why is None:
            return plan
        if settings.drill is not None:
            notes.note_sweep(SweepReport(why_not=why))
        is_of_test = plan.faults is not None and not (isinstance(plan.faults, Sweep) and plan.faults.drill)
        if is_of_test:
            raise host.refusal(f"@faults of {plan.case.name}", why)
        return replace(plan, faults=None)

    def prepare(self, attempt: RankAttempt) -> None:
        attempt.sanitize = attempt.sanitize.with_faults(attempt.faults)


FAULTS = Faults()
