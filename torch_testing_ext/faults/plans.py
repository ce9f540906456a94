"""The faults of a test, each at its point, and the recovery that the test requires."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from torch_testing_ext import fault_points

from .kinds import PlannedFault, PlannedRestart, is_number

# Keeps these frames out of tracebacks: a wrong argument is shown at the line of the user.
__unittest = True
__tracebackhide__ = True

T = TypeVar("T")

# The attribute of a test that has them.
PLAN = "_torch_testing_ext_faults"


@dataclass(frozen=True)
class FaultPlan:
    """All faults of a test, and the recovery that it requires."""

    faults: tuple[PlannedFault, ...] = ()
    restarts: tuple[int, ...] = ()
    within: float | None = None
    must_reach: tuple[str, ...] = ()
    # A run that seeks hangs takes an exception that nobody catches for the end of its rank.
    uncaught_ends: bool = False

    @property
    def victims(self) -> frozenset[int]:
        """The ranks that have faults."""
        return frozenset(fault.rank for fault in self.faults if fault.rank is not None)

    @property
    def stopped_for_good(self) -> frozenset[int]:
        """The ranks that a fault stops until another rank heals them."""
        stops = [fault for fault in self.faults if fault.kind == "stop" and fault.seconds is None]
        return FaultPlan(tuple(stops)).victims

    def why_not(self, world_size: int) -> str:
        """Why this plan is impossible for so many ranks, with the remedy; "" if it is not."""
        ranks = [*((fault.rank, str(fault)) for fault in self.faults), *((r, f"restart({r})") for r in self.restarts)]
        for rank, what in ranks:
            if rank is not None and rank >= world_size:
                return f"{what}: the test has {world_size} ranks; give a rank from 0 to {world_size - 1}"
        if self.faults and all(self._dies(rank) for rank in range(world_size)):
            return "no rank is left to judge: let one live, or start one again by restart(rank)"
        return ""

    def _dies(self, rank: int) -> bool:
        """Whether the last process of a rank dies by a fault."""
        last = self.restarts.count(rank)
        return any(
            fault.rank == rank and fault.incarnation >= last and (fault.is_deadly or fault.ends_rank)
            for fault in self.faults
        )


def plan_of(planned: Iterable[Any], within: float | None = None, must_reach: Iterable[str] = ()) -> FaultPlan:
    """Make a plan of the arguments of `@faults`. Raises ValueError, which names the remedy."""
    planned = tuple(planned)
    chosen = tuple(each for each in planned if isinstance(each, PlannedFault))
    again = tuple(each for each in planned if isinstance(each, PlannedRestart))
    restarts = tuple(each.rank for each in again for _ in range(each.times))
    if len(chosen) + len(again) < len(planned) or not chosen:
        raise ValueError("@faults takes faults, such as @faults(kill(rank=1, at=call(3)))")
    for fault in chosen:
        if fault.rank is None or fault.at is None:
            raise ValueError(f"{fault}: say which rank and where: {fault.kind}(..., rank=1, at=call(3))")
    points = [(fault.rank, fault.at) for fault in chosen]
    for number, place in enumerate(points):
        if place in points[:number]:
            raise ValueError(f"rank {place[0]} has two faults at {place[1]}; give each a point of its own")
    # Nobody catches the exception that is to have the rank start again.
    chosen = tuple(replace(f, ends_rank=True) if f.kind == "raises" and f.rank in restarts else f for f in chosen)
    for rank in restarts:
        if not any(fault.rank == rank and (fault.is_deadly or fault.ends_rank) for fault in chosen):
            raise ValueError(f"restart({rank}): no fault ends that rank; give it one, such as kill(rank={rank}, ...)")
    for fault in chosen:
        if fault.incarnation > restarts.count(cast("int", fault.rank)):
            needed = f"restart({fault.rank}, times={fault.incarnation})"
            raise ValueError(f"{fault}: the rank is not started again so often; add {needed}")
    for rank in {*restarts}:
        deaths = sorted({f.incarnation for f in chosen if f.rank == rank and (f.is_deadly or f.ends_rank)})
        if deaths[: restarts.count(rank)] != list(range(restarts.count(rank))):
            again_in_words = f"restart({rank}, times={restarts.count(rank)}): faults end its processes {deaths}"
            point = f"mark(..., incarnation={restarts.count(rank) - 1})"
            raise ValueError(f"{again_in_words}; end each one before the last, by points such as {point}")
    if within is not None and not (is_number(within) and within > 0):
        raise ValueError(f"@faults(within={within!r}): give a number of seconds greater than 0")
    must_reach = must_reach if isinstance(must_reach, str) else tuple(must_reach)
    if isinstance(must_reach, str) or not all(isinstance(name, str) for name in must_reach):
        raise ValueError(f"@faults(must_reach={must_reach!r}): give a list of names")
    return FaultPlan(chosen, restarts, within, tuple(must_reach))


def faults(*planned: Any, within: float | None = None, must_reach: Iterable[str] = ()) -> Callable[[T], T]:
    """Decorator: inject these faults; the test fails if one of them does not happen.

    `within`: seconds that the survivors have after a fault. `must_reach`: names that some rank must give
    to `reached`.
    """
    return giving("@faults", plan_of(planned, within, must_reach))


def giving(decorator: str, plan: object) -> Callable[[T], T]:
    def decorate(test: T) -> T:
        if isinstance(test, type):
            raise ValueError(f"{decorator} is for a test, and {test.__name__} is a class: decorate its methods")
        if hasattr(test, PLAN):
            raise ValueError(f"{decorator}: this test has faults already; give it all in one decorator")
        guarded: Any = test if inspect.iscoroutinefunction(test) else _guarded(test)
        setattr(guarded, PLAN, plan)
        return cast("T", guarded)

    return decorate


def _guarded(test: Any) -> Any:
    """The test, which fails where nobody has its faults happen."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> Any:
        if fault_points.rank is None:
            bases = "MultiProcessTestCase, MultiProcContinuousTest, or @pytest.mark.world_size"
            raise RuntimeError(f"@faults: {test.__qualname__} does not run in ranks that can die: use {bases}")
        return test(*args, **kwargs)

    return run
