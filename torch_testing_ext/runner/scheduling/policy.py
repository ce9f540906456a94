"""Which unit begins next: a pure policy over what waits and what is free. No clock, no process.

Units on devices compete for devices alone, units without for CPU slots alone: two lines that never wait for each other.
In a line the widest unit goes first, of these the longest: what is narrow then fills the gaps that the wide ones leave.
Except that a unit goes before all others if it lasts as long as they would on the whole machine.
Who does not fit into what is free, or is pushed back by later arrivals, is overtaken only so often: nobody starves.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..model import Unit

# How often a waiting unit is overtaken, for each device or slot of the machine: seldom enough that it soon begins,
# often enough that what is free meanwhile does not span idle.
PATIENCE = 2
UNKNOWN = 1.0  # seconds, where the duration of no unit is known: all are then alike

Order = Callable[[Unit], Any]


def no_preference(unit: Unit) -> int:
    return 0


def slots_of(unit: Unit, slots: int) -> int:
    """The CPU slots a unit takes: one a rank, all there are if it has more; none if its ranks compute on devices."""
    return 0 if unit.devices else min(unit.ranks, slots)


class Queue:
    """The units that wait. `order` puts some before others whatever their size: the smallest value goes first."""

    def __init__(self, units: Iterable[Unit], devices: int, slots: int, order: Order = no_preference):
        units = tuple(units)
        typical = typical_seconds(units)
        on_devices = [unit for unit in units if unit.devices]
        on_slots = [unit for unit in units if not unit.devices]
        self._on_devices = _Line(on_devices, devices, lambda unit: unit.devices, order, typical)
        self._on_slots = _Line(on_slots, slots, lambda unit: slots_of(unit, slots), order, typical)

    def __len__(self) -> int:
        return len(self._on_devices) + len(self._on_slots)

    def add(self, unit: Unit) -> None:
        (self._on_devices if unit.devices else self._on_slots).add(unit)

    def take(self, free_devices: int, free_slots: int) -> Unit | None:
        """The unit to begin now; None where one has to end first."""
        return self._on_devices.take(free_devices) or self._on_slots.take(free_slots)

    def clear(self) -> tuple[Unit, ...]:
        """Nothing shall begin any more; what was waiting."""
        return (*self._on_devices.clear(), *self._on_slots.clear())


def typical_seconds(units: Sequence[Unit]) -> float:
    known = [unit.seconds for unit in units if unit.seconds is not None]
    return statistics.median(known) if known else UNKNOWN


@dataclass
class _Waiting:
    unit: Unit
    width: int
    seconds: float
    order: Any
    overtaken: int = 0

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.order, -self.width, -self.seconds)

    @property
    def area(self) -> float:
        return self.width * self.seconds


class _Line:
    """Those who wait for one resource, in the order in which they shall begin."""

    def __init__(self, units: list[Unit], size: int, width: Callable[[Unit], int], order: Order, typical: float):
        self._size, self._width, self._order, self._typical = size, width, order, typical
        self._patience = PATIENCE * size
        self._waiting = sorted((self._newcomer(unit) for unit in units), key=lambda one: one.key)

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, unit: Unit) -> None:
        newcomer = self._newcomer(unit)
        place = len(self._waiting)
        while place and self._gives_way(self._waiting[place - 1], newcomer):
            place -= 1
        self._insert(place, newcomer)

    def take(self, free: int) -> Unit | None:
        if not self._waiting or not free:
            return None
        self._hasten_the_longest()
        first = self._waiting[0]
        if first.width > free and first.overtaken >= self._patience:
            return None
        place = next((place for place, one in enumerate(self._waiting) if one.width <= free), None)
        if place is None:
            return None
        first.overtaken += place > 0
        return self._waiting.pop(place).unit

    def clear(self) -> list[Unit]:
        waiting, self._waiting = self._waiting, []
        return [one.unit for one in waiting]

    def _newcomer(self, unit: Unit) -> _Waiting:
        width = self._width(unit)
        assert width <= self._size, f"unit {unit.number} needs {width} of {self._size}: it can never begin"
        return _Waiting(unit, width, self._typical if unit.seconds is None else unit.seconds, self._order(unit))

    def _gives_way(self, one: _Waiting, newcomer: _Waiting) -> bool:
        return newcomer.key < one.key and one.overtaken < self._patience

    def _insert(self, place: int, one: _Waiting) -> None:
        for pushed_back in self._waiting[place:]:
            pushed_back.overtaken += 1
        self._waiting.insert(place, one)

    def _hasten_the_longest(self) -> None:
        """To the front with a unit that lasts as long as all that waits would on the whole machine."""
        first = self._waiting[0]
        longest = max((one for one in self._waiting if one.order == first.order), key=lambda one: one.seconds)
        work = sum(one.area for one in self._waiting)
        if longest is not first and longest.seconds * self._size >= work and first.overtaken < self._patience:
            self._waiting.remove(longest)
            self._insert(0, longest)
