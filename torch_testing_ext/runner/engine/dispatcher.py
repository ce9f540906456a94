"""Starts the units that wait as leases become free: the queue decides which is next, the leases what it gets."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext

from torch_testing_ext._process.loop import EventLoop

from ..events import WaitingForDevices
from ..model import Lease, Unit
from ..scheduling.policy import Queue, RunLeases
from .memory_return import HeldDevice, MemoryReturn
from .other_runs import OtherRuns


class Dispatcher:
    """The units of a run that have not ended, and their leases."""

    def __init__(
        self, queue: Queue, leases: RunLeases, memory: MemoryReturn, loop: EventLoop, others: OtherRuns | None = None
    ):
        self._queue = queue
        self._leases = leases
        self._memory = memory
        self._loop = loop
        self._others = others
        self._left: Counter[str] = Counter()  # units of each file that have not ended
        self._numbers = itertools.count()

    # -- units

    def begin(self, units: Iterable[Unit]) -> None:
        """Note the units that the queue has from the start."""
        units = tuple(units)
        self._numbers = itertools.count(max((unit.number for unit in units), default=-1) + 1)
        self._left.update(unit.file for unit in units)

    def add(self, unit: Unit) -> None:
        """Queue a unit, which gets a number of its own."""
        self._left[unit.file] += 1
        self._queue.add(dataclasses.replace(unit, number=next(self._numbers)))

    def end(self, unit: Unit) -> bool:
        """Note that a unit has ended. Returns whether it was the last of its file."""
        self._left[unit.file] -= 1
        return not self._left[unit.file]

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(self._left)

    def clear(self) -> tuple[Unit, ...]:
        """Remove and return all units that wait."""
        return self._queue.clear()

    def drop_hopeless(self) -> tuple[tuple[Unit, ...], str]:
        """Remove and return the units for which too few devices are left, and why."""
        units = self._queue.drop(lambda unit: not self._leases.may_fit(unit)) if self._memory.held else ()
        return units, f"too few devices are left: {'; '.join(map(str, self._memory.held))}"

    @property
    def has_units(self) -> bool:
        """Whether units wait."""
        return bool(len(self._queue))

    @property
    def is_waiting(self) -> bool:
        """Whether something other than a running unit is to come: memory of a lease, or devices of other runs."""
        return self.awaits_memory or (self._others is not None and self._others.are_awaited)

    @property
    def awaits_memory(self) -> bool:
        return self._memory.is_waiting

    # -- leases

    def dispatch(self, start: Callable[[Unit, Lease], None]) -> None:
        """Start each unit that fits now."""
        started = True
        while started:
            with self._others.choosing(self._queue.wants_devices) if self._others is not None else nullcontext():
                started = self._start_next(start)

    def _start_next(self, start: Callable[[Unit, Lease], None]) -> bool:
        unit = self._queue.take(self._leases.free_devices, self._leases.free_slots)
        if unit is None:
            return False
        lease = self._leases.take(unit)
        self._memory.leased(lease.devices)
        start(unit, lease)
        return True

    def wait_for_others(self) -> WaitingForDevices | None:
        """If other runs have the devices that are missing, try again in a moment. Returns what the user has to know."""
        return self._others.wait(self._queue.wants_devices, self._loop) if self._others is not None else None

    def when_back(self, lease: Lease, then: Callable[[tuple[HeldDevice, ...]], None]) -> None:
        """The processes of a lease have ended: call `then` when memory is back, with the devices that keep some."""
        self._memory.when_back(lease.devices, then)

    def give_back(self, lease: Lease) -> None:
        self._leases.give_back(lease)
        if self._others is not None:
            self._others.give_back(lease)

    def close(self) -> None:
        """No lease is taken any more."""
        self._memory.close()

    def give_up(self) -> None:
        """The run ends: wait for no memory any more."""
        self._memory.give_up()
