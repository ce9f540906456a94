"""The start of the units that wait, as leases become free."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from torch_testing_ext._process.event_loop import EventLoop
from torch_testing_ext.runner.events import WaitingForDevices
from torch_testing_ext.runner.model import Lease, Unit
from torch_testing_ext.runner.scheduling.protocol import RunLeases
from torch_testing_ext.runner.scheduling.unit_queue import Queue

from .memory_return import MemoryReturn
from .other_runs import OtherRuns


@dataclass
class Dispatcher:
    """The units of a run that have not ended, and their leases."""

    queue: Queue
    leases: RunLeases
    memory: MemoryReturn
    loop: EventLoop
    others: OtherRuns | None = None
    # Units of each file that have not ended.
    _left: Counter[str] = field(default_factory=Counter)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    # -- units

    def begin(self, units: Iterable[Unit]) -> None:
        """Note the units that the queue has from the start."""
        units = tuple(units)
        self._numbers = itertools.count(max((unit.number for unit in units), default=-1) + 1)
        self._left.update(unit.file for unit in units)

    def add(self, unit: Unit) -> None:
        self._left[unit.file] += 1
        self.queue.add(replace(unit, number=next(self._numbers)))

    def end(self, unit: Unit) -> bool:
        """Note that a unit has ended. Returns whether it was the last of its file."""
        self._left[unit.file] -= 1
        return not self._left[unit.file]

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(self._left)

    def drop_hopeless(self) -> tuple[tuple[Unit, ...], str]:
        """Remove and return the units for which too few devices are left, and why."""
        if not self.memory.held:
            return (), ""
        units = self.queue.drop(lambda unit: not self.leases.may_fit(unit))
        devices = "; ".join(str(device) for device in self.memory.held)
        return units, f"too few devices are left: {devices}"

    @property
    def is_waiting(self) -> bool:
        """Whether something other than a running unit is to come: memory of a lease, or devices of other runs."""
        if self.memory.is_waiting:
            return True
        return self.others is not None and self.others.are_awaited

    # -- leases

    def dispatch(self, start: Callable[[Unit, Lease], None]) -> None:
        """Start each unit that fits now."""
        started = True
        while started:
            if self.others is None:
                started = self._start_next(start)
            else:
                with self.others.choosing(self.queue.wants_devices):
                    started = self._start_next(start)

    def _start_next(self, start: Callable[[Unit, Lease], None]) -> bool:
        unit = self.queue.take(self.leases.free_devices, self.leases.free_slots)
        if unit is None:
            return False
        lease = self.leases.take(unit)
        self.memory.leased(lease.devices)
        start(unit, lease)
        return True

    def wait_for_others(self) -> WaitingForDevices | None:
        """If other runs have the devices that are missing, try again in a moment. Returns what the user has to know."""
        if self.others is None:
            return None
        return self.others.wait(self.queue.wants_devices, self.loop)

    def give_back(self, lease: Lease) -> None:
        self.leases.give_back(lease)
        if self.others is not None:
            self.others.give_back(lease)
