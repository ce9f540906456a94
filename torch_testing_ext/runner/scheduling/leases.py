"""Leases of devices and CPU slots: nothing is handed out twice at the same time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch_testing_ext._machine.device_needs import DeviceFacts, groups_that_meet
from torch_testing_ext.runner.model import Lease, Unit


def slots_of(unit: Unit, slots: int) -> int:
    """The number of a node's CPU slots that a unit waits for: one per process, at most all; none if they use devices.

    Ranks on devices wait for none, and leave fewer to the others.
    """
    if unit.devices:
        return 0
    return min(unit.processes, slots)


class Size(NamedTuple):
    """The number of devices or slots of the largest machine of a run, and of all."""

    largest: int
    total: int


@dataclass(eq=False)
class Leases:
    """The devices and CPU slots of a machine, and which of them are leased."""

    # The names of the devices.
    names: tuple[str, ...]
    number_of_slots: int
    # The facts of each device, if they are known.
    facts: Sequence[DeviceFacts] = ()
    # The backend of ranks that share devices.
    shared_backend: str = ""
    # The node, if the run has a cluster.
    node: str = ""
    _held: list[Lease] = field(default_factory=list)
    # The ranks of each lease of devices, which use processors as well.
    _ranks_on_devices: list[tuple[Lease, int]] = field(default_factory=list)
    _quarantined: set[str] = field(default_factory=set)
    _withheld: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        are_unique = len(set(self.names)) == len(self.names)
        assert are_unique, f"two devices have the same name: {self.names}"

    def withhold(self, names: Iterable[str]) -> None:
        """Lease none of these devices, and any other again: other runs have them."""
        self._withheld = frozenset(names)

    def unheld(self) -> list[str]:
        """The devices that this run could lease, if no other run had them."""
        taken = set(self._quarantined)
        for lease in self._held:
            taken.update(lease.devices)
        return [name for name in self.names if name not in taken]

    @property
    def devices(self) -> Size:
        number = len(self.names)
        return Size(number, number)

    @property
    def slots(self) -> Size:
        return Size(self.number_of_slots, self.number_of_slots)

    @property
    def free_devices(self) -> int:
        return len(self._free())

    @property
    def free_slots(self) -> int:
        """Ranks on devices take slots as well, but one unit on the CPU, of any width, may always run beside them."""
        taken = sum(len(lease.slots) for lease in self._held)
        by_ranks_on_devices = sum(ranks for _, ranks in self._ranks_on_devices) if taken else 0
        return max(self.number_of_slots - by_ranks_on_devices - taken, 0)

    def take(self, unit: Unit) -> Lease:
        """Lease exactly what the unit needs, which must be free: the queue decides which unit fits."""
        devices = self._choose(self._free(), unit)
        assert devices is not None, f"unit {unit.number} needs {unit.devices} of {self.free_devices} devices"
        wanted_slots = slots_of(unit, self.number_of_slots)
        slots = self._lowest_free_slots(wanted_slots)
        lease = Lease(
            devices,
            slots,
            alone=unit.alone,
            shared_by=unit.shared_by,
            over=self.shared_backend if unit.shared_by else "",
            node=self.node,
        )
        assert len(devices) == unit.devices, f"unit {unit.number} needs {unit.devices}, not {devices}"
        assert len(slots) == wanted_slots, f"unit {unit.number} does not fit into {slots}"
        self._held.append(lease)
        if devices:
            self._ranks_on_devices.append((lease, unit.processes))
        self._check()
        return lease

    def _lowest_free_slots(self, count: int) -> tuple[int, ...]:
        taken: set[int] = set()
        for lease in self._held:
            taken.update(lease.slots)
        free = [slot for slot in range(self.number_of_slots) if slot not in taken]
        return tuple(free[:count])

    def _free(self) -> list[str]:
        return [name for name in self.unheld() if name not in self._withheld]

    def _choose(self, free: Sequence[str], unit: Unit) -> tuple[str, ...] | None:
        """Choose devices that satisfy the unit; None if too few are free."""
        count = unit.devices
        if len(free) < count:
            return None
        if not unit.of_devices or not self.facts:
            return tuple(free[:count])
        free_numbers = [self.names.index(name) for name in free]
        # The first of them: there may be many.
        numbers = next(groups_that_meet(self.facts, unit.of_devices, count, free_numbers), None)
        return None if numbers is None else tuple(self.names[number] for number in numbers)

    def quarantine(self, name: str) -> None:
        """Never lease a device again in this run."""
        self._quarantined.add(name)

    def may_fit(self, unit: Unit) -> bool:
        """Whether there are devices that the unit can get when others have ended."""
        if not self._quarantined or not unit.devices:
            return True
        left = [name for name in self.names if name not in self._quarantined]
        chosen = self._choose(left, unit)
        return chosen is not None

    def fits(self, unit: Unit) -> bool:
        """Whether the free resources, which are enough, have what the unit needs, in one place."""
        if not unit.of_devices:
            return True
        chosen = self._choose(self._free(), unit)
        return chosen is not None

    def reserve(self, unit: Unit) -> bool:
        """Other units wait until this one fits: no part of this machine is kept for it."""
        return False

    def may_run_now(self, unit: Unit) -> bool:
        """Whether neither the unit nor one of those that run has to be alone."""
        if not self._held:
            return True
        if unit.alone:
            return False
        return not any(lease.alone for lease in self._held)

    def holds(self, lease: Lease) -> bool:
        return any(other is lease for other in self._held)

    def give_back(self, lease: Lease) -> None:
        """Frees a lease. Call it when every process of the unit is gone."""
        assert self.holds(lease), f"{lease} is not held"
        self._held = [other for other in self._held if other is not lease]
        self._ranks_on_devices = [(other, ranks) for other, ranks in self._ranks_on_devices if other is not lease]

    def _check(self) -> None:
        devices: list[str] = []
        slots: list[int] = []
        for lease in self._held:
            devices += lease.devices
            slots += lease.slots
        assert len(set(devices)) == len(devices), f"two leases overlap in devices: {self._held}"
        assert len(set(slots)) == len(slots), f"two leases overlap in slots: {self._held}"
