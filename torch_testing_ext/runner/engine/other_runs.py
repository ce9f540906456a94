"""Other runs on this machine that use the same devices: locks of files keep the leases of all of them apart."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch_testing_ext._machine.device_locks import DeviceLocks
from torch_testing_ext._process.event_loop import EventLoop, Timer
from torch_testing_ext.runner.events import WaitingForDevices
from torch_testing_ext.runner.model import Lease
from torch_testing_ext.runner.scheduling.leases import Leases

# While other runs have the devices: how often to try again, in seconds. Random, so that two runs do not retry in
# lockstep.
RETRY_INTERVAL = (0.05, 0.2)
# Seconds of waiting.
REPORT_AFTER = 0.5
RESERVE_AFTER = 2.0


@dataclass
class _Wait:
    """The wait of a unit for devices that other runs have."""

    clock: Callable[[], float]
    since: float
    retry: Timer | None = None
    # The other runs that the user knows of.
    reported: tuple[str, ...] | None = None

    @property
    def seconds(self) -> float:
        return self.clock() - self.since


@dataclass
class OtherRuns:
    """Keeps devices that this run leases from other runs, and its leases off devices that these have."""

    locks: DeviceLocks
    leases: Leases
    # Devices that other runs had when this run tried to get them last.
    _elsewhere: tuple[str, ...] = ()
    _wait: _Wait | None = None

    @contextmanager
    def choosing(self, wanted: bool) -> Iterator[None]:
        """The time in which a unit is started: until its end, other runs cannot take the free devices.

        `wanted`: whether any unit waits for devices. If one has waited for long, the run keeps free devices, and has
        other runs leave theirs, until a unit that uses devices has started.
        """
        free = self.leases.unheld()
        self._elsewhere = self._acquire(free) if wanted else ()
        self.leases.withhold(self._elsewhere)
        try:
            yield
        finally:
            self._end_choice(started=len(self.leases.unheld()) < len(free))

    def _acquire(self, names: list[str]) -> tuple[str, ...]:
        """Lock each of these devices. Returns those that other runs have, or have reserved."""
        reserved = self.locks.reserved_by_others()
        elsewhere = []
        for name in names:
            if name in reserved or not self.locks.acquire(name):
                elsewhere.append(name)
        return tuple(elsewhere)

    def _end_choice(self, started: bool) -> None:
        """`started`: whether a unit has got devices, so that the reservation has served its purpose."""
        is_urgent = self._wait is not None and self._wait.seconds > RESERVE_AFTER
        if started:
            self._wait = None
        elif is_urgent and self._elsewhere and self.locks.reserve():
            return
        self.locks.end_reservation()
        for name in self.leases.unheld():
            self.locks.release(name)

    def give_back(self, lease: Lease) -> None:
        for name in lease.devices:
            self.locks.release(name)

    @property
    def are_awaited(self) -> bool:
        return self._wait is not None

    def wait(self, wanted: bool, loop: EventLoop) -> WaitingForDevices | None:
        """If devices are missing because other runs have them, try again in a moment: a lock cannot be awaited.

        Returns what the user has to know. `wanted`: whether any unit waits for devices.
        """
        if not (wanted and self._elsewhere):
            self._wait = None
            return None
        if self._wait is None:
            self._wait = _Wait(loop.clock, loop.clock())
        if self._wait.retry is None or self._wait.retry.at <= loop.clock():
            # It is enough to wake the loop: whatever happens, units are dispatched then.
            self._wait.retry = loop.after(random.uniform(*RETRY_INTERVAL), lambda: None)
        owners = self._owners()
        if owners == self._wait.reported or self._wait.seconds <= REPORT_AFTER:
            return None
        self._wait.reported = owners
        return WaitingForDevices(self._elsewhere, owners)

    def _owners(self) -> tuple[str, ...]:
        """The other runs that have the devices, each once, as far as they are known."""
        owners: dict[str, None] = {}
        for name in self._elsewhere:
            owner = self.locks.owner_of(name)
            if owner:
                owners[owner] = None
        return tuple(owners)
