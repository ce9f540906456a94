"""The faults of a test that have happened to a rank, as its log tells them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_testing_ext.faults import FaultPlan, PlannedFault


@dataclass(frozen=True)
class HappenedFault:
    """A fault that has happened to a rank. `index`: its place in the plan; `place`: such as `at all_reduce #3`."""

    index: int
    fault: PlannedFault
    place: str
    at: float

    def __str__(self) -> str:
        return f"{self.fault.did} {self.place} by the fault"


@dataclass(frozen=True)
class FaultsSeen:
    """The faults that have happened to a rank, and what it has issued and reached."""

    happened: tuple[HappenedFault, ...] = ()
    # Calls during which a fault was to happen, and which were over before.
    missed: Mapping[int, str] = field(default_factory=dict)
    # How often the rank has passed what faults count that have not happened.
    counts: Mapping[int, int] = field(default_factory=dict)
    # All that the rank has passed.
    passed: Mapping[str, int] = field(default_factory=dict)
    # When each name was reached last.
    reached: Mapping[str, float] = field(default_factory=dict)

    @property
    def processes(self) -> int:
        """The number of the latest process in which a fault has happened, or was awaited."""
        return max((happened.fault.incarnation for happened in self.happened), default=0)

    def ended_in(self, incarnation: int) -> bool:
        """Whether a fault has ended this process of the rank."""
        deadly = (each.fault for each in self.happened if each.fault.is_deadly or each.fault.ends_rank)
        return any(fault.incarnation == incarnation for fault in deadly)

    @classmethod
    def of(cls, events: Iterable[Mapping[str, Any]], plan: FaultPlan) -> FaultsSeen:
        """Read the events of a rank's log."""
        happened: list[HappenedFault] = []
        missed: dict[int, str] = {}
        reached: dict[str, float] = {}
        counts: dict[int, int] = {}
        passed: dict[str, int] = {}
        for event in events:
            match event["event"]:
                case "fault":
                    index = event["fault"]
                    happened.append(HappenedFault(index, plan.faults[index], event["place"], event["at"]))
                case "missed":
                    missed[event["fault"]] = event["place"]
                case "reached":
                    reached[event["name"]] = max(event["at"], reached.get(event["name"], 0.0))
                case "seen":
                    counts |= {int(index): number for index, number in event["counts"].items()}
                    passed = event["seen"]
        return cls(tuple(happened), missed, counts, passed, reached)


NO_FAULTS = FaultsSeen()
