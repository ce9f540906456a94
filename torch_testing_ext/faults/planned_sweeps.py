"""Faults that are tried one by one, at each point of each rank."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from .kinds import PlannedFault
from .plans import FaultPlan, giving, plan_of
from .points import OPERATIONS, Point, call, checked_ranks, step

T = TypeVar("T")


class Wrong(enum.Enum):
    """The ends of a test with a fault that fail the test. A run that asks for a sweep only wants to know of hangs."""

    FAILURES = "failures"
    HANGS = "hangs"
    NOTHING = "nothing"

    @property
    def is_of_run(self) -> bool:
        return self is not Wrong.FAILURES

    @property
    def verb(self) -> str:
        return "hang" if self.is_of_run else "fail"


@dataclass(frozen=True)
class Points:
    """All points of a kind, or of all kinds, that a rank passes while nothing is wrong."""

    where: str
    phase: str = "before"

    def of(self, passed: Mapping[str, int]) -> list[Point]:
        """The points of a rank, from the number of times that it has passed each."""
        found = []
        for name, times in {"call": _number_of_calls(passed), **passed}.items():
            where, _, mark_name = name.partition(" ")
            if where in ("call", "step", "mark") and self.where in (where, "all"):
                found += [Point(where, n, name=mark_name, phase=self.phase) for n in range(1, times + 1)]
        return found


def calls(phase: str = "before") -> Points:
    """All collectives and messages of a rank."""
    return Points("call", call(1, phase=phase).phase)


def steps(phase: str = "before") -> Points:
    """All steps of optimizers of a rank."""
    return Points("step", step(1, phase=phase).phase)


@dataclass(frozen=True)
class KnownFailure:
    """A fault of a sweep that the test is known not to survive."""

    fault: PlannedFault
    reason: str
    # The test, in a sweep that a run asks for. The name may lack the beginning, or have more of it.
    test: str = ""

    def is_of(self, test: str) -> bool:
        """Whether this is the test that is known."""
        shorter, longer = sorted((_dotted(test), _dotted(self.test)), key=len)
        return f".{longer}".endswith(f".{shorter}")


def _dotted(test: str) -> str:
    return test.replace(".py::", ".").replace("::", ".").replace("/", ".")


def known(fault: PlannedFault, reason: str) -> KnownFailure:
    """Let this fault of a sweep fail, such as `kill(1, at=call(3))`. It is still tried, and must not pass."""
    if not isinstance(fault, PlannedFault) or fault.rank is None or fault.at is None:
        raise ValueError("known() takes a fault with its rank and point: known(kill(1, at=call(3)), 'the reason')")
    if not isinstance(reason, str) or not reason.strip():
        raise ValueError(f"known({fault}): say why it fails")
    return KnownFailure(fault, reason)


@dataclass(frozen=True)
class Sweep:
    """Faults that are tried one by one, at each point of each of these ranks; without ranks, of all."""

    faults: tuple[PlannedFault, ...]
    at: Points
    ranks: tuple[int, ...] = ()
    within: float | None = None
    must_reach: tuple[str, ...] = ()
    known: tuple[KnownFailure, ...] = ()
    wrong: Wrong = Wrong.FAILURES

    def of_test(self, name: str) -> Sweep:
        """The sweep of a test, for one that a run asks for: with what is known of this test."""
        return replace(self, known=tuple(each for each in self.known if each.is_of(name)))

    @property
    def recording(self) -> FaultPlan:
        """Nothing happens, so that the points are known."""
        return FaultPlan()

    def plans(self, passed: Mapping[int, Mapping[str, int]]) -> list[FaultPlan]:
        """One plan for each fault, rank and point. `passed`: what each rank has passed while nothing was wrong."""
        plans = []
        for fault in self.faults:
            for rank in self.ranks or sorted(passed):
                for at in self.at.of(passed.get(rank, {})):
                    one = (replace(fault, rank=rank, at=at),)
                    plans.append(FaultPlan(one, (), self.within, self.must_reach, self.wrong.is_of_run))
        return plans

    def why_known(self, fault: PlannedFault) -> str:
        """The reason for which this fault is known to do what is wrong; "" if it is not."""
        return next((each.reason for each in self.known if each.fault == fault), "")

    def missing(self, tried: Iterable[PlannedFault]) -> list[KnownFailure]:
        """The known failures that should have been tried, and were not: the ranks pass no such point any more."""
        tried = set(tried)
        return [each for each in self.known if each.fault not in tried and self._tries(each.fault)]

    def _tries(self, fault: PlannedFault) -> bool:
        """Whether this is a fault of the sweep, at a point of its kind."""
        is_at = fault.at is not None and self.at.where in ("all", fault.at.where)
        return is_at and replace(fault, rank=None, at=None) in self.faults

    def why_not(self, world_size: int) -> str:
        """See FaultPlan."""
        ranks = self.ranks or (0,)
        swept = [replace(fault, rank=rank) for fault in self.faults for rank in ranks]
        plans = [FaultPlan((fault,)) for fault in (*swept, *(each.fault for each in self.known))]
        return next(filter(None, (plan.why_not(world_size) for plan in plans)), "")


def _number_of_calls(passed: Mapping[str, int]) -> int:
    return sum(times for name, times in passed.items() if name in OPERATIONS)


def fault_sweep(
    *planned: Any,
    at: Points,
    ranks: Any = "all",
    within: float | None = None,
    must_reach: Iterable[str] = (),
    known: Iterable[KnownFailure] = (),
) -> Callable[[T], T]:
    """Decorator: run the test once as it is, and once for each of these faults, each rank and each of its points.

    `at`: `calls()` or `steps()`. `ranks`: numbers, or "all". The test passes if all runs do, but those that are
    `known` to fail.
    """
    made = [each() if callable(each) else each for each in planned]
    if not made or not all(isinstance(each, PlannedFault) and each.rank is None and each.at is None for each in made):
        raise ValueError("@fault_sweep takes faults without rank and point: @fault_sweep(kill, stop(2), at=calls())")
    if not isinstance(at, Points):
        raise ValueError(f"@fault_sweep(at={at!r}): give calls() or steps()")
    chosen = () if ranks == "all" else checked_ranks(ranks, f"@fault_sweep(ranks={ranks!r})", '"all"')
    checked = plan_of([replace(each, rank=0, at=Point("call", 1)) for each in made[:1]], within, must_reach)
    excepted = tuple(known)
    for each in excepted:
        if not isinstance(each, KnownFailure):
            raise ValueError(f"@fault_sweep(known=[{each}]): give a reason: known({each}, 'the reason')")
        _check_is_tried(each.fault, made, at, chosen)
    return giving("@fault_sweep", Sweep(tuple(made), at, chosen, within, checked.must_reach, excepted))


def _check_is_tried(fault: PlannedFault, among: list[PlannedFault], at: Points, ranks: tuple[int, ...]) -> None:
    """Raise ValueError if a sweep tries no such fault."""
    assert fault.at is not None
    of_sweep = Point(at.where, fault.at.n, phase=at.phase)
    if replace(fault, rank=None, at=None) not in among or fault.at != of_sweep or (ranks and fault.rank not in ranks):
        such = replace(among[0], rank=min(ranks, default=0), at=Point(at.where, 1, phase=at.phase))
        raise ValueError(f"known({fault}): the sweep tries no such fault, but faults such as {such}")
