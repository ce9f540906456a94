"""Hands out devices and CPU slots to units. Nothing is handed out twice at the same time."""

from __future__ import annotations

from ..model import Lease, Unit
from .policy import slots_of


class Leases:
    """The devices and CPU slots of a run, and which of them are leased."""

    def __init__(self, devices: tuple[str, ...], slots: int):
        assert len(set(devices)) == len(devices), f"two devices have the same name: {devices}"
        self._devices, self._slots = devices, tuple(range(slots))
        self._held: list[Lease] = []

    @property
    def free_devices(self) -> int:
        return len(self._devices) - sum(len(lease.devices) for lease in self._held)

    @property
    def free_slots(self) -> int:
        return len(self._slots) - sum(len(lease.slots) for lease in self._held)

    def take(self, unit: Unit) -> Lease:
        """Leases exactly what the unit needs, which must be free: the queue decides which unit fits."""
        devices = [name for name in self._devices if not any(name in lease.devices for lease in self._held)]
        slots = [slot for slot in self._slots if not any(slot in lease.slots for lease in self._held)]
        lease = Lease(tuple(devices[: unit.devices]), tuple(slots[: slots_of(unit, len(self._slots))]))
        assert len(lease.devices) == unit.devices, f"unit {unit.number} needs {unit.devices} of {len(devices)} devices"
        assert len(lease.slots) == slots_of(unit, len(self._slots)), f"unit {unit.number} does not fit into {slots}"
        self._held.append(lease)
        self._check()
        return lease

    def give_back(self, lease: Lease) -> None:
        """Frees a lease. Call it when every process of the unit is gone."""
        held = [one is lease for one in self._held]
        assert any(held), f"{lease} is not held"
        del self._held[held.index(True)]

    def _check(self) -> None:
        for resource in ("devices", "slots"):
            held = [name for lease in self._held for name in getattr(lease, resource)]
            assert len(set(held)) == len(held), f"two leases overlap in {resource}: {self._held}"
