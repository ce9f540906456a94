"""Starts the units that wait as leases become free: the queue decides which is next, the leases what it gets."""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch_testing_ext._process.loop import EventLoop, Timer

from ..events import WaitingForDevices
from ..model import Lease, Unit
from ..scheduling.leases import Leases
from ..scheduling.node_leases import NodeLeases
from ..scheduling.policy import Queue
from .memory_return import HeldDevice, MemoryReturn

# While other runs have the devices: how often to try again, in seconds. Random, so that two runs do not retry in
# lockstep.
RETRY_INTERVAL = (0.05, 0.2)
TELL_AFTER = 0.5  # seconds of waiting
RESERVE_AFTER = 2.0  # seconds of waiting


@dataclass
class _Wait:
    """How long a unit has waited for devices that other runs have."""

    since: float = field(default_factory=time.monotonic)
    retry: Timer | None = None
    reported: tuple[str, ...] | None = None  # the other runs that the user knows of

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since


class Dispatcher:
    """The units of a run that have not ended, and their leases."""

    def __init__(self, queue: Queue, leases: Leases | NodeLeases, memory: MemoryReturn, loop: EventLoop):
        self._queue = queue
        self._leases = leases
        self._memory = memory
        self._loop = loop
        self._held: tuple[HeldDevice, ...] = ()
        self._wait: _Wait | None = None
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
        units = self._queue.drop(lambda unit: not self._leases.can_ever_fit(unit)) if self._held else ()
        return units, f"too few devices are left: {'; '.join(map(str, self._held))}"

    @property
    def has_units(self) -> bool:
        """Whether units wait."""
        return bool(len(self._queue))

    @property
    def is_waiting(self) -> bool:
        """Whether something other than a running unit is to come: memory of a lease, or devices of other runs."""
        return self.awaits_memory or self._wait is not None

    @property
    def awaits_memory(self) -> bool:
        return self._memory.is_waiting

    # -- leases

    def dispatch(self, start: Callable[[Unit, Lease], None]) -> None:
        """Start each unit that fits now."""
        started = True
        while started:
            waited = self._wait.seconds if self._wait is not None else 0.0
            with self._leases.choosing(self._queue.wants_devices, urgent=waited > RESERVE_AFTER):
                started = self._start_next(start)

    def _start_next(self, start: Callable[[Unit, Lease], None]) -> bool:
        unit = self._queue.take(self._leases.free_devices, self._leases.free_slots)
        if unit is None:
            return False
        if unit.devices:
            self._wait = None
        lease = self._leases.take(unit)
        self._memory.leased(lease.devices)
        start(unit, lease)
        return True

    def wait_for_others(self) -> WaitingForDevices | None:
        """If devices are missing because other runs have them, try again in a moment: a lock cannot be awaited.

        Returns what the user has to know.
        """
        if not (self._queue.wants_devices and self._leases.elsewhere):
            self._wait = None
            return None
        if self._wait is None:
            self._wait = _Wait()
        if self._wait.retry is None or self._wait.retry.at <= time.monotonic():
            # It is enough to wake the loop: whatever happens, units are dispatched then.
            self._wait.retry = self._loop.after(random.uniform(*RETRY_INTERVAL), lambda: None)
        if (owners := self._leases.owners()) == self._wait.reported or self._wait.seconds <= TELL_AFTER:
            return None
        self._wait.reported = owners
        return WaitingForDevices(self._leases.elsewhere, owners)

    def when_back(self, lease: Lease, then: Callable[[tuple[HeldDevice, ...]], None]) -> None:
        """The processes of a lease have ended: call `then` when memory is back, with the devices that keep some."""
        self._memory.when_back(lease.devices, then)

    def give_back(self, lease: Lease, held: tuple[HeldDevice, ...] = ()) -> None:
        """End a lease. Devices that are `held` are not leased again."""
        self._leases.give_back(lease)
        for one in held:
            self._leases.quarantine(one.name)
        self._held += held

    def give_up(self) -> None:
        """The run ends: wait for no memory any more."""
        self._memory.give_up()
