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
        self._learned: dict[str, frozenset[int | str]] = {}  # ports, by file, that failures have shown

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
        lease = Lease(
            tuple(devices[: unit.devices]),
            tuple(slots[: slots_of(unit, len(self._slots))]),
            self._ports_of(unit),
            unit.alone,
        )
        assert len(lease.devices) == unit.devices, f"unit {unit.number} needs {unit.devices} of {len(devices)} devices"
        assert len(lease.slots) == slots_of(unit, len(self._slots)), f"unit {unit.number} does not fit into {slots}"
        self._held.append(lease)
        self._check()
        return lease

    def may_run_now(self, unit: Unit) -> bool:
        """Does the unit not disturb those that run? Two units that use the same fixed port would."""
        if unit.alone:
            return not self._held
        return not any(lease.alone or lease.ports & self._ports_of(unit) for lease in self._held)

    def learn_ports(self, file: str, ports: frozenset[int]) -> None:
        """A test of this file found a port in use: from now on, its tests run one by one, whichever port it was."""
        self._learned[file] = self._learned.get(file, frozenset()) | {file} | ports

    def _ports_of(self, unit: Unit) -> frozenset[int | str]:
        return unit.ports | self._learned.get(unit.file, frozenset())

    def give_back(self, lease: Lease) -> None:
        """Frees a lease. Call it when every process of the unit is gone."""
        held = [one is lease for one in self._held]
        assert any(held), f"{lease} is not held"
        del self._held[held.index(True)]

    def _check(self) -> None:
        for resource in ("devices", "slots"):
            held = [name for lease in self._held for name in getattr(lease, resource)]
            assert len(set(held)) == len(held), f"two leases overlap in {resource}: {self._held}"
