"""Leases on several nodes: one set of leases for each node, and the choice of the node for a unit. Pure.

A unit runs on one node. It gets the node that it leaves the least free room on, so that wide units find nodes that are
free as a whole; among equal ones, a node that has the unit's file open already.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..model import Lease, Unit
from .leases import Leases
from .policy import Queue, slots_of


class NodeLeases:
    """The devices and CPU slots of all nodes, and which of them are leased."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        self._reserved: tuple[int, str] | None = None  # the number of a unit, and the node that is kept for it
        self._queue: Queue | None = None

    def serve(self, queue: Queue) -> None:
        """Tell a queue how large the nodes are, now and when some come or go."""
        self._queue = queue
        self._resize()

    # -- nodes

    def add(self, name: str, devices: tuple[str, ...], slots: int) -> None:
        """A node has joined."""
        self._nodes[name] = _Node(Leases(devices, slots, node=name), len(devices), slots)
        self._resize()

    def drop(self, name: str) -> None:
        """A node is lost: what was leased there is nothing any more."""
        self._nodes.pop(name, None)
        self._end_reservation(name)
        self._resize()

    def drain(self, name: str) -> None:
        """A node gets no further units, and is dropped when its units have ended or it is lost."""
        if name in self._nodes:
            self._nodes[name].draining = True
            self._end_reservation(name)
            self._resize()

    def _resize(self) -> None:
        if self._queue is not None:
            nodes = list(self._usable())
            self._queue.resize(
                self.most_devices,
                self.most_slots,
                sum(node.devices for _, node in nodes),
                sum(node.slots for _, node in nodes),
            )

    def _end_reservation(self, name: str) -> None:
        if self._reserved is not None and name == self._reserved[1]:
            self._reserved = None

    def _usable(self) -> Iterator[tuple[str, _Node]]:
        return ((name, node) for name, node in self._nodes.items() if not node.draining)

    @property
    def most_devices(self) -> int:
        """The devices of the node that has most."""
        return max((node.devices for _, node in self._usable()), default=0)

    @property
    def most_slots(self) -> int:
        """The CPU slots of the node that has most."""
        return max((node.slots for _, node in self._usable()), default=0)

    # -- what the engine and the queue ask

    @property
    def free_devices(self) -> int:
        """The most devices that are free on one node."""
        return max((node.leases.free_devices for _, node in self._usable()), default=0)

    @property
    def free_slots(self) -> int:
        """The most CPU slots that are free on one node."""
        return max((node.leases.free_slots for _, node in self._usable()), default=0)

    def may_run_now(self, unit: Unit) -> bool:
        """Is there a node on which the unit does not disturb those that run?"""
        return any(node.leases.may_run_now(unit) for _, node in self._usable())

    def fits(self, unit: Unit) -> bool:
        """Whether there is room for the unit on a node now."""
        return self._choose(unit) is not None

    def may_fit(self, unit: Unit) -> bool:
        """Whether a node is large enough for the unit."""
        return any(node.size(unit) >= self._width(unit) for _, node in self._usable())

    def reserve(self, unit: Unit) -> bool:
        """Keep other units off a node that suits this one, until it fits there: off that with most room already."""
        if self._reserved is not None and self._reserved[0] == unit.number:
            return True
        if len(self._nodes) < 2:
            return False
        width = self._width(unit)
        suitable = [(node.free(unit), name) for name, node in self._usable() if node.size(unit) >= width]
        if suitable:
            self._reserved = unit.number, max(suitable)[1]
        return bool(suitable)

    def take(self, unit: Unit) -> Lease:
        """Leases exactly what the unit needs on the node that suits it best, which must have room."""
        name = self._choose(unit)
        assert name is not None, f"unit {unit.number} fits on no node"
        if self._reserved is not None and self._reserved[0] == unit.number:
            self._reserved = None
        node = self._nodes[name]
        node.files.add(unit.file)
        return node.leases.take(unit)

    def give_back(self, lease: Lease) -> None:
        """Frees a lease. That of a node which is lost is gone already."""
        node = self._nodes.get(lease.node)
        if node is not None and node.leases.holds(lease):
            node.leases.give_back(lease)

    def _width(self, unit: Unit) -> int:
        return unit.devices or slots_of(unit, self.most_slots)

    def _choose(self, unit: Unit) -> str | None:
        width, best, found = self._width(unit), None, None
        for name, node in self._usable():
            left = node.free(unit) - width
            if left < 0 or not self._is_open_to(name, unit) or not node.leases.may_run_now(unit):
                continue
            key = (left, unit.file not in node.files)
            if best is None or key < best:
                best, found = key, name
        return found

    def _is_open_to(self, name: str, unit: Unit) -> bool:
        return self._reserved is None or name != self._reserved[1] or self._reserved[0] == unit.number


class _Node:
    """The leases of one node, and which files are open there."""

    def __init__(self, leases: Leases, devices: int, slots: int):
        self.leases = leases
        self.devices, self.slots = devices, slots
        self.files: set[str] = set()
        self.draining = False

    def size(self, unit: Unit) -> int:
        return self.devices if unit.devices else self.slots

    def free(self, unit: Unit) -> int:
        return self.leases.free_devices if unit.devices else self.leases.free_slots
