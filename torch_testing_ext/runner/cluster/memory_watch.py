"""Watches the memory of a node, and ends the unit that uses most before the kernel or Ray ends something else.

Ray would end the agent, whoever has the memory, and with it all units of the node; the kernel would end any process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from torch_testing_ext._machine.memory import MachineMemory, MemoryUse
from torch_testing_ext._machine.sharing import in_words
from torch_testing_ext._process.loop import EventLoop

INTERVAL = 0.2
MEASURE_TIMEOUT = 1.0
# Of the node's memory: above it, a unit is ended. Ray ends the agent at 0.95, the kernel somebody at 1.
MOST_SHARE = 0.9
# Below that of Ray, if Ray has been given another one: by how much.
BELOW_RAY = 0.05
# Of the node's memory: if all units together have less, ending one would not help.
LEAST_SHARE = 0.1


class MeasuredUnit(Protocol):
    """A unit, as far as the watch needs it."""

    def measure_memory(self, answer: Callable[[int], object]) -> None: ...
    def end_for_memory(self, why: str, for_others: bool) -> None: ...


class MemoryWatch:
    """Looks at the memory of the node from time to time."""

    def __init__(
        self,
        loop: EventLoop,
        memory: MachineMemory,
        most_share: float,
        units: Callable[[], Mapping[int, MeasuredUnit]],
        warn: Callable[[str], object],
    ):
        """`units`: all that run on this node."""
        self._loop = loop
        self._memory = memory
        self._most_share = most_share
        self._units = units
        self._warn = warn
        self._ended: MeasuredUnit | None = None
        self._has_warned = False
        self._timer = loop.after(0.0, self._look)

    def _look(self) -> None:
        use = self._memory.use()
        units = self._units()
        ending = any(unit is self._ended for unit in units.values())
        if use is None or use.share < self._most_share or ending or not units:
            self._timer = self._loop.after(INTERVAL, self._look)
            return
        found: dict[int, int] = {}
        measuring = self._timer = self._loop.after(MEASURE_TIMEOUT, lambda: self._relieve(use, found))
        count = len(units)

        def add(number: int, used: int) -> None:
            found[number] = used
            if len(found) == count and self._timer is measuring:
                measuring.cancel()
                self._relieve(use, found)

        for number, unit in units.items():
            unit.measure_memory(partial(add, number))

    def _relieve(self, use: MemoryUse, found: Mapping[int, int]) -> None:
        """All units have said how much they use, or some in time: end the one that uses most."""
        self._timer = self._loop.after(INTERVAL, self._look)
        units = {number: unit for number, unit in self._units().items() if number in found}
        if not units:
            return
        together = sum(found[number] for number in units)
        if together < LEAST_SHARE * use.limit:
            if not self._has_warned:
                self._has_warned = True
                self._warn(f"it is at {use}, of which tests use {in_words(together)}: if more is used, it may be lost")
            return
        fattest = max(units, key=lambda number: found[number])
        self._ended = units[fattest]
        size = in_words(found[fattest])
        for_others = len(units) > 1
        which = f"of the {len(units)} units there, this one used most" if for_others else "this unit used"
        self._ended.end_for_memory(f"the node was at {use}; {which}: {size}", for_others)


def most_share(of_ray: str = "") -> float:
    """Above which share of its memory a node ends units. `of_ray`: the value of RAY_memory_usage_threshold there."""
    try:
        rays = float(of_ray) if of_ray else 1.0
    except ValueError:
        rays = 1.0
    return max(0.0, min(MOST_SHARE, rays - BELOW_RAY))
