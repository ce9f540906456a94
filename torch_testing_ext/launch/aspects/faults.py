"""The faults of a test, by its decorator or by the run: which hosts can have them, and how they reach the ranks."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch_testing_ext._tests import notes
from torch_testing_ext._tests.sweep_reports import SweepReport
from torch_testing_ext.faults import PLAN, FaultPlan, Sweep
from torch_testing_ext.launch.attempts import Aspect, HostKind
from torch_testing_ext.launch.launch_settings import read_settings

if TYPE_CHECKING:
    from torch_testing_ext.launch.attempts import Host, RankAttempt, TestPlan
    from torch_testing_ext.launch.launch_settings import Settings


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
        say_not_swept(why, settings)
        is_of_test = plan.faults is not None and not (isinstance(plan.faults, Sweep) and plan.faults.wrong.is_of_run)
        if is_of_test:
            raise host.refusal(f"@faults of {plan.case.name}", why)
        return replace(plan, faults=None)

    def prepare(self, attempt: RankAttempt) -> None:
        attempt.sanitize = attempt.sanitize.with_faults(attempt.faults)


FAULTS = Faults()


def plan_on(target: Any) -> FaultPlan | Sweep | None:
    """Return what `@faults` or `@fault_sweep` has given to this function or method; None without one."""
    plan: FaultPlan | Sweep | None = getattr(target, PLAN, None)
    return plan


def faults_of_test(test: Any, restarts: bool = True) -> FaultPlan | Sweep | None:
    """Return what `@faults` or `@fault_sweep` gives to this test case. Raises its error if its ranks cannot have it.

    `restarts`: a rank can be started again.
    """
    plan = plan_on(_method(test))
    if plan is None:
        # The number of ranks may be that of the devices, which takes long to find.
        if read_settings().sweep is None:
            return None
        own = test._overrides("_check_return_codes")
        why = "its class judges exit codes itself, by _check_return_codes" if own else ""
        return sweep_of_run(test.id(), int(test.world_size), why)
    say_not_swept(OWN_FAULTS)
    why = plan.why_not(int(test.world_size))
    if isinstance(plan, FaultPlan) and plan.restarts and not restarts:
        why = why or f"restart({plan.restarts[0]}) needs ranks of its own for each test: use MultiProcessTestCase"
    if why:
        raise test._error(f"@faults of {type(test).__qualname__}.{test._testMethodName}: {why}")
    return plan


# Why a test is in no sweep of the run.
OWN_FAULTS = "it has faults of its own"


def sweep_of_run(test: str, world_size: int, why_not: str = "") -> Sweep | None:
    """Return the faults that the run tries in the test with this name; None if it tries none.

    `why_not`: the reason for which this test cannot have them.
    """
    sweep = read_settings().sweep
    if sweep is None:
        return None
    why_not = why_not or ("it has one rank, and nobody survives that" if world_size == 1 else "")
    if why_not:
        say_not_swept(why_not)
        return None
    return sweep.of_test(test)


def say_not_swept(why: str, settings: Settings | None = None) -> None:
    """Tell the runner why a test is not in the sweep of the run, if there is one."""
    if (settings or read_settings()).sweep is not None:
        notes.note_sweep(SweepReport(why_not=why))


def check_faults(cls: type) -> None:
    """Raise ValueError if a test of this class has faults for a rank that it has not, as far as that is known."""
    plans = {name: plan for name, test in vars(cls).items() if (plan := plan_on(test)) is not None}
    if not plans:
        # The number of ranks may be that of the devices, which takes long to find.
        return
    size = getattr(cls, "world_size", None)
    if isinstance(size, property):
        # It may need more than an instance has that nobody has made.
        with suppress(Exception):
            size = size.__get__(object.__new__(cls))
    if not isinstance(size, int) or size < 1:
        return
    for name, plan in plans.items():
        why = plan.why_not(size)
        if why:
            raise ValueError(f"@faults of {cls.__qualname__}.{name}: {why}")


def _method(test: Any) -> Any:
    return getattr(test, test._testMethodName, None)
