"""Leases on several nodes, and the choice of the node for a unit.

A unit runs on one node. It gets the node that it leaves the least free room on, so that wide units find nodes that
are free as a whole; among equal ones, a node that has the unit's file open already.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch_testing_ext.runner.model import Lease, Unit

from .leases import Leases, Size, slots_of


class NodeLeases:
    """The devices and CPU slots of all nodes, and which of them are leased."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        # A node, and the number of the unit that it is kept for.
        self._reserved: dict[str, int] = {}

    # -- nodes

    def add(self, name: str, devices: tuple[str, ...], slots: int) -> None:
        leases = Leases(devices, slots, node=name)
        self._nodes[name] = _Node(leases)

    def drop(self, name: str) -> None:
        """A node is lost: what was leased there is nothing any more."""
        self._nodes.pop(name, None)
        self._reserved.pop(name, None)

    def drain(self, name: str) -> None:
        """A node gets no further units, and is dropped when its units have ended or it is lost."""
        if name in self._nodes:
            self._nodes[name].draining = True
            self._reserved.pop(name, None)

    def _usable(self) -> dict[str, _Node]:
        usable = {}
        for name, node in self._nodes.items():
            if not node.draining:
                usable[name] = node
        return usable

    # -- what the engine and the queue ask

    @property
    def devices(self) -> Size:
        totals = [node.leases.devices.total for node in self._usable().values()]
        return _size(totals)

    @property
    def slots(self) -> Size:
        totals = [node.leases.slots.total for node in self._usable().values()]
        return _size(totals)

    @property
    def free_devices(self) -> int:
        """The most devices that are free on one node."""
        numbers = [node.leases.free_devices for node in self._usable().values()]
        return max(numbers, default=0)

    @property
    def free_slots(self) -> int:
        """The most CPU slots that are free on one node."""
        numbers = [node.leases.free_slots for node in self._usable().values()]
        return max(numbers, default=0)

    def may_run_now(self, unit: Unit) -> bool:
        nodes = self._usable().values()
        return any(node.leases.may_run_now(unit) for node in nodes)

    def fits(self, unit: Unit) -> bool:
        """Whether there is room for the unit on a node now."""
        return self._choose(unit) is not None

    def may_fit(self, unit: Unit) -> bool:
        """Whether a node is large enough for the unit."""
        width = self._width(unit)
        sizes = [node.size(unit) for node in self._usable().values()]
        return any(size >= width for size in sizes)

    def reserve(self, unit: Unit) -> bool:
        """Keep other units off a node that suits this one, until it fits there: off that with most room already."""
        if unit.number in self._reserved.values():
            return True
        if len(self._nodes) < 2:
            return False
        width = self._width(unit)
        suitable = []
        for name, node in self._usable().items():
            if node.size(unit) >= width:
                suitable.append((node.free(unit), name))
        if not suitable:
            return False
        _, name = max(suitable)
        self._reserved = {name: unit.number}
        return True

    def take(self, unit: Unit) -> Lease:
        """Leases exactly what the unit needs on the node that suits it best, which must have room."""
        name = self._choose(unit)
        assert name is not None, f"unit {unit.number} fits on no node"
        if unit.number in self._reserved.values():
            self._reserved = {}
        node = self._nodes[name]
        node.files.add(unit.file)
        return node.leases.take(unit)

    def give_back(self, lease: Lease) -> None:
        """Frees a lease. That of a node which is lost is gone already."""
        node = self._nodes.get(lease.node)
        if node is not None and node.leases.holds(lease):
            node.leases.give_back(lease)

    def _width(self, unit: Unit) -> int:
        return unit.devices or slots_of(unit, self.slots.largest)

    def _choose(self, unit: Unit) -> str | None:
        """The node with room for the unit that it leaves the least of; of equal ones, one that has its file open."""
        width = self._width(unit)
        suitable = {}
        for name, node in self._usable().items():
            is_for_others = self._reserved.get(name, unit.number) != unit.number
            left = node.free(unit) - width
            if left >= 0 and not is_for_others and node.leases.may_run_now(unit):
                suitable[name] = (left, unit.file not in node.files)
        return min(suitable, key=suitable.__getitem__, default=None)


# The resources of a run, of which it leases some to each unit: those of this machine, or of a cluster's nodes.


def _size(numbers: list[int]) -> Size:
    return Size(max(numbers, default=0), sum(numbers))


@dataclass
class _Node:
    """The leases of one node, and which files are open there."""

    leases: Leases
    files: set[str] = field(default_factory=set)
    draining: bool = False

    def size(self, unit: Unit) -> int:
        if unit.devices:
            return self.leases.devices.total
        return self.leases.slots.total

    def free(self, unit: Unit) -> int:
        if unit.devices:
            return self.leases.free_devices
        return self.leases.free_slots
