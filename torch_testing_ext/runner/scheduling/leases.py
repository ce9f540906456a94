"""Hands out devices and CPU slots to units. Nothing is handed out twice at the same time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch_testing_ext._machine.device_facts import DeviceFacts, groups
from torch_testing_ext._machine.device_locks import DeviceLocks
from torch_testing_ext._machine.nvml import Gpu
from torch_testing_ext._machine.topology import best, preferred

from ..model import Lease, Unit
from .policy import slots_of


class Leases:
    """The devices and CPU slots of a run, and which of them are leased. With `locks`, other runs share the devices."""

    def __init__(
        self,
        devices: tuple[str, ...],
        slots: int,
        locks: DeviceLocks | None = None,
        facts: Sequence[DeviceFacts] = (),
        shared_backend: str = "",
        gpus: Mapping[str, Gpu] | None = None,
        node: str = "",
    ):
        """`facts`: of each device, if they are known. `shared_backend`: of ranks that share devices.

        `gpus`: what NVML knows about them. `node`: of a cluster.
        """
        assert len(set(devices)) == len(devices), f"two devices have the same name: {devices}"
        self._devices, self._slots = devices, tuple(range(slots))
        self._held: list[Lease] = []
        self._locks = locks
        self._node = node
        self._facts = facts
        self._shared_backend = shared_backend
        self._gpus = gpus or {}
        self._quarantined: set[str] = set()
        self._elsewhere: tuple[str, ...] = ()  # devices that other runs have leased or reserved

    @property
    def elsewhere(self) -> tuple[str, ...]:
        """The devices that other runs had when this run tried to get them last."""
        return self._elsewhere

    @contextmanager
    def choosing(self, wanted: bool, urgent: bool) -> Iterator[None]:
        """The time in which units are started: until its end, other runs cannot take the free devices.

        `wanted`: whether any unit waits for devices. `urgent`: keep free devices, and have other runs leave theirs,
        until a unit that waits for them has started.
        """
        if self._locks is None:
            yield
            return
        free = self._unheld()
        reserved = self._locks.reserved_by_others() if wanted else frozenset()
        self._elsewhere = tuple(n for n in free if wanted and (n in reserved or not self._locks.acquire(n)))
        before = len(self._held)
        try:
            yield
        finally:
            self._end_choice(before, urgent)

    def _end_choice(self, before: int, urgent: bool) -> None:
        assert self._locks is not None
        if len(self._held) > before and any(lease.devices for lease in self._held[before:]):
            self._locks.end_reservation()  # it has got what it was for
        elif urgent and self._elsewhere and self._locks.reserve():
            return
        else:
            self._locks.end_reservation()
        for name in self._unheld():
            self._locks.release(name)

    def locks_of(self, lease: Lease) -> tuple[int, ...]:
        """The descriptors that keep the devices of a lease locked."""
        return self._locks.descriptors(lease.devices) if self._locks is not None else ()

    def environment_of(self, lease: Lease) -> dict[str, str]:
        """The environment variables of a leaseholder, for runs that it starts."""
        return self._locks.leased(lease.devices) if self._locks is not None and lease.devices else {}

    def owners(self) -> tuple[str, ...]:
        """The runs that have the devices which are elsewhere, in words."""
        if self._locks is None:
            return ()
        return tuple(dict.fromkeys(filter(None, map(self._locks.owner_of, self._elsewhere))))

    def close(self) -> None:
        """Leave all devices to other runs. Call it when no process of this run is left."""
        if self._locks is not None:
            self._locks.close()

    def _unheld(self) -> list[str]:
        held = {name for lease in self._held for name in lease.devices} | self._quarantined
        return [name for name in self._devices if name not in held]

    @property
    def free_devices(self) -> int:
        return len(self._free())

    @property
    def free_slots(self) -> int:
        return len(self._slots) - sum(len(lease.slots) for lease in self._held)

    def take(self, unit: Unit) -> Lease:
        """Leases exactly what the unit needs, which must be free: the queue decides which unit fits."""
        wanted_slots = slots_of(unit, len(self._slots))
        devices = self._choose(unit)
        assert devices is not None, f"unit {unit.number} needs {unit.devices} of {self.free_devices} devices"
        slots = [slot for slot in self._slots if not any(slot in lease.slots for lease in self._held)]
        lease = Lease(
            devices,
            tuple(slots[:wanted_slots]),
            alone=unit.alone,
            shared_by=unit.shared_by,
            over=self._shared_backend if unit.shared_by else "",
            node=self._node,
        )
        assert len(lease.devices) == unit.devices, f"unit {unit.number} needs {unit.devices}, not {devices}"
        assert len(lease.slots) == wanted_slots, f"unit {unit.number} does not fit into {slots}"
        self._held.append(lease)
        self._check()
        return lease

    def _free(self) -> list[str]:
        return [name for name in self._unheld() if name not in self._elsewhere]

    def _choose(self, unit: Unit) -> tuple[str, ...] | None:
        """Choose devices that satisfy the unit; None if too few are free."""
        return self._among(self._free(), unit)

    def _among(self, free: Sequence[str], unit: Unit) -> tuple[str, ...] | None:
        count = unit.devices
        if len(free) < count:
            return None
        if not unit.of_devices or not self._facts:
            return preferred(free, count, self._gpus)
        among = [self._devices.index(name) for name in free]
        found = groups(self._facts, unit.of_devices, count, among)
        named = (tuple(self._devices[number] for number in group) for group in found)
        return best(named, free, count, self._gpus)

    def quarantine(self, name: str) -> None:
        """Lease a device no more in this run."""
        self._quarantined.add(name)

    def can_ever_fit(self, unit: Unit) -> bool:
        """Whether there are devices that the unit can get when others have ended."""
        if not self._quarantined or not unit.devices:
            return True
        left = [name for name in self._devices if name not in self._quarantined]
        return self._among(left, unit) is not None

    def may_fit(self, unit: Unit) -> bool:
        """Whether the devices that there are now are enough: here they do not become more."""
        return self.can_ever_fit(unit)

    def fits(self, unit: Unit) -> bool:
        """Whether there are free devices that have what the unit needs."""
        return not unit.devices or self._choose(unit) is not None

    def reserve(self, unit: Unit) -> bool:
        """Other units wait until this one fits: no part of this machine is kept for it."""
        return False

    def may_run_now(self, unit: Unit) -> bool:
        """Whether neither the unit nor one of those that run has to be alone."""
        return not any(unit.alone or lease.alone for lease in self._held)

    def holds(self, lease: Lease) -> bool:
        return any(one is lease for one in self._held)

    def give_back(self, lease: Lease) -> None:
        """Frees a lease. Call it when every process of the unit is gone."""
        assert self.holds(lease), f"{lease} is not held"
        self._held = [one for one in self._held if one is not lease]
        if self._locks is not None:
            for name in lease.devices:
                self._locks.release(name)

    def _check(self) -> None:
        for resource in ("devices", "slots"):
            held = [name for lease in self._held for name in getattr(lease, resource)]
            assert len(set(held)) == len(held), f"two leases overlap in {resource}: {self._held}"
