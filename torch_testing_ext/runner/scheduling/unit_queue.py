"""The choice of the unit that starts next.

Units that use devices compete only for devices, the others only for CPU slots: two queues that never wait for each
other. In a queue the widest unit starts first, and among equally wide units the longest: narrow units then fill the
gaps that wide ones leave. Exception: a unit starts before all others if it takes as long as all of them on the
whole machine. A unit that does not fit into the free resources, or that later arrivals push back, can be overtaken
only a limited number of times, so no unit starves.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch_testing_ext.runner.model import Unit

from .leases import Size, slots_of
from .protocol import RunLeases

# How often a waiting unit can be overtaken, per device or slot of the machine: rarely enough that it starts soon, often
# enough that free resources are not idle meanwhile.
MOST_OVERTAKEN = 2
# A sum that is kept up to date collects rounding errors.
_ROUNDING = 0.999
# Seconds; used if the duration of no unit is known, so that all units are equal.
UNKNOWN = 1.0

Priority = Callable[[Unit], Any]


def no_preference(unit: Unit) -> int:
    """The priority if all units are equal."""
    return 0


class Queue:
    """The units that wait. Units with a smaller `priority` start before others regardless of size."""

    def __init__(self, units: Iterable[Unit], leases: RunLeases, priority: Priority = no_preference):
        units = tuple(units)
        typical = typical_seconds(units)
        on_devices = [unit for unit in units if unit.devices]
        on_slots = [unit for unit in units if not unit.devices]
        self._on_devices = _ResourceQueue(on_devices, lambda: leases.devices, priority, typical, leases)
        self._on_slots = _ResourceQueue(on_slots, lambda: leases.slots, priority, typical, leases)

    def __len__(self) -> int:
        return len(self._on_devices) + len(self._on_slots)

    @property
    def wants_devices(self) -> bool:
        """Whether a unit waits for devices."""
        return len(self._on_devices) > 0

    def add(self, unit: Unit) -> None:
        queue = self._on_devices if unit.devices else self._on_slots
        queue.add(unit)

    def take(self, free_devices: int, free_slots: int) -> Unit | None:
        """Removes and returns the unit to start now; None if another unit has to end first."""
        return self._on_devices.take(free_devices) or self._on_slots.take(free_slots)

    def drop(self, is_hopeless: Callable[[Unit], bool]) -> tuple[Unit, ...]:
        """Removes and returns the units that can never start."""
        return self._on_devices.drop(is_hopeless)

    def clear(self) -> tuple[Unit, ...]:
        """Removes and returns all waiting units."""
        return (*self._on_devices.clear(), *self._on_slots.clear())


def typical_seconds(units: Sequence[Unit]) -> float:
    """The median of the expected durations that are known."""
    known = [unit.seconds for unit in units if unit.seconds is not None]
    if not known:
        return UNKNOWN
    return statistics.median(known)


@dataclass
class _WaitingUnit:
    """A unit that waits."""

    unit: Unit
    width: int
    seconds: float
    priority: Any
    overtaken: int = 0

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.priority, -self.width, -self.seconds)

    @property
    def area(self) -> float:
        return self.width * self.seconds


class _ResourceQueue:
    """The units that wait for one resource, in the order in which they should start."""

    def __init__(
        self,
        units: list[Unit],
        size: Callable[[], Size],
        priority: Priority,
        typical: float,
        leases: RunLeases,
    ):
        """`size`: of the resource, which changes when nodes come or go."""
        self._find_size = size
        self._priority = priority
        self._typical = typical
        self._leases = leases
        self._size = size()
        # The widest unit that may be added: as wide as the largest node that has been there.
        self._widest = self._size.largest
        self._waiting = [self._to_waiting(unit) for unit in units]
        self._waiting.sort(key=lambda waiting: waiting.key)
        self._work = self._total_work()
        self._longest_ever = max((waiting.seconds for waiting in self._waiting), default=0.0)

    def _total_work(self) -> float:
        return sum(waiting.area for waiting in self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def _most_overtaken(self) -> int:
        return MOST_OVERTAKEN * self._size.total

    def _width(self, unit: Unit) -> int:
        return unit.devices or slots_of(unit, self._size.largest)

    def _resize(self) -> None:
        size = self._find_size()
        if size == self._size:
            return
        self._size = size
        self._widest = max(self._widest, size.largest)
        for waiting in self._waiting:
            waiting.width = self._width(waiting.unit)
        self._work = self._total_work()

    def add(self, unit: Unit) -> None:
        self._resize()
        arrival = self._to_waiting(unit)
        self._work += arrival.area
        self._longest_ever = max(self._longest_ever, arrival.seconds)
        self._insert(self._place_for(arrival), arrival)

    def _place_for(self, arrival: _WaitingUnit) -> int:
        """The place by its key, but behind every unit that may not be overtaken again."""
        for place in range(len(self._waiting), 0, -1):
            before = self._waiting[place - 1]
            if arrival.key >= before.key or before.overtaken >= self._most_overtaken:
                return place
        return 0

    def take(self, free: int) -> Unit | None:
        """Removes and returns the unit to start now; None if another unit has to end first."""
        self._resize()
        if not self._waiting or not free:
            return None
        self._promote_longest()
        chosen = self._choose(free)
        if chosen is None:
            return None
        self._waiting = [waiting for waiting in self._waiting if waiting is not chosen]
        self._work = self._work - chosen.area if self._waiting else 0.0
        return chosen.unit

    def _choose(self, free: int) -> _WaitingUnit | None:
        """The first unit that may start, if it fits, else one that fits and overtakes it."""
        ready = filter(self._may_start, self._waiting)
        first = next(ready, None)
        if first is None or self._fits(first, free):
            return first
        must_be_next = first.overtaken >= self._most_overtaken
        if must_be_next and not self._leases.reserve(first.unit):
            return None
        for waiting in ready:
            if self._fits(waiting, free):
                first.overtaken += 1
                return waiting
        return None

    def _may_start(self, waiting: _WaitingUnit) -> bool:
        """A unit that may not run now waits for another to end, or for a larger node, and does not hold up the rest."""
        if not self._leases.may_run_now(waiting.unit):
            return False
        return self._leases.may_fit(waiting.unit)

    def _fits(self, waiting: _WaitingUnit, free: int) -> bool:
        if waiting.width > free:
            return False
        return self._leases.fits(waiting.unit)

    def drop(self, is_hopeless: Callable[[Unit], bool]) -> tuple[Unit, ...]:
        dropped = []
        left = []
        for waiting in self._waiting:
            if is_hopeless(waiting.unit):
                dropped.append(waiting.unit)
            else:
                left.append(waiting)
        self._waiting = left
        self._work = self._total_work()
        return tuple(dropped)

    def clear(self) -> list[Unit]:
        units = [waiting.unit for waiting in self._waiting]
        self._waiting = []
        self._work = 0.0
        return units

    def _to_waiting(self, unit: Unit) -> _WaitingUnit:
        width = self._width(unit)
        assert width <= self._widest, f"unit {unit.number} needs {width} of {self._widest}: it can never start"
        seconds = self._typical if unit.seconds is None else unit.seconds
        return _WaitingUnit(unit, width, seconds, self._priority(unit))

    def _insert(self, place: int, arrival: _WaitingUnit) -> None:
        for pushed_back in self._waiting[place:]:
            pushed_back.overtaken += 1
        self._waiting.insert(place, arrival)

    def _promote_longest(self) -> None:
        """Moves a unit to the front if it takes as long as all waiting units on the whole machine."""
        if self._longest_ever * self._size.total < self._work * _ROUNDING:
            # No unit is that long, so thousands of short tests need no look at each.
            return
        first = self._waiting[0]
        if first.overtaken >= self._most_overtaken:
            return
        equals = [waiting for waiting in self._waiting if waiting.priority == first.priority]
        longest = max(equals, key=lambda waiting: waiting.seconds)
        takes_as_long = longest.seconds * self._size.total >= self._total_work()
        if longest is not first and takes_as_long:
            self._waiting.remove(longest)
            self._insert(0, longest)
