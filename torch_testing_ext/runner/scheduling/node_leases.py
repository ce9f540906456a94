"""Leases on several nodes: one set of leases for each node, and the choice of the node for a unit. Pure.

A unit runs on one node. It gets the node that it leaves the least free room on, so that wide units find nodes that are
free as a whole; among equal ones, a node that has the unit's file open already. A unit that needs several nodes gets
all of its leases at once or none, so that two such units never wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from ..model import Lease, Unit
from .leases import Leases
from .policy import Queue, slots_of


class NodeLeases:
    """The devices and CPU slots of all nodes, and which of them are leased."""

    elsewhere: tuple[str, ...] = ()  # what other users of the cluster have is not ours to lease

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        self._reserved: tuple[int, frozenset[str]] | None = None  # the number of a unit, and nodes that are kept for it
        self._learned: list[tuple[str, frozenset[int]]] = []
        self._queue: Queue | None = None

    def serve(self, queue: Queue) -> None:
        """Tell a queue how large the nodes are, now and when some come or go."""
        self._queue = queue
        self._resize()

    # -- nodes

    def add(self, name: str, devices: tuple[str, ...], slots: int) -> None:
        """A node has joined."""
        leases = Leases(devices, slots)
        for file, ports in self._learned:
            leases.learn_ports(file, ports)
        self._nodes[name] = _Node(leases, len(devices), slots)
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
        if self._reserved is not None and name in self._reserved[1]:
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

    @contextmanager
    def choosing(self, wanted: bool, urgent: bool) -> Iterator[None]:
        """The time in which units are started."""
        yield

    def owners(self) -> tuple[str, ...]:
        """The other runs that this one waits for, in words: none is known."""
        return ()

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
        """Whether there is room for the unit now: on one node, or on several for one that needs several."""
        return bool(self._choose_all(unit)) if unit.spans else self._choose(unit) is not None

    def may_fit(self, unit: Unit) -> bool:
        """Whether the nodes are large enough for the unit."""
        sizes = [node.size(unit) for _, node in self._usable()]
        return (sum(sizes) if unit.spans else max(sizes, default=0)) >= self._width(unit)

    def reserve(self, unit: Unit) -> bool:
        """Keep other units off the nodes that suit this one, until it fits there: off those with most room already."""
        if self._reserved is not None and self._reserved[0] == unit.number:
            return True
        if len(self._nodes) < 2:
            return False
        by_room = sorted(((node.free(unit), name) for name, node in self._usable()), reverse=True)
        kept: list[str] = []
        width = self._width(unit)
        for _, name in by_room:
            if unit.spans or self._nodes[name].size(unit) >= width:
                kept.append(name)
                if not unit.spans or sum(self._nodes[one].size(unit) for one in kept) >= width:
                    self._reserved = unit.number, frozenset(kept)
                    return True
        return False

    def take(self, unit: Unit) -> Lease:
        """Leases exactly what the unit needs on the nodes that suit it best, which must have room."""
        if unit.spans:
            widths = self._choose_all(unit)
        else:
            name = self._choose(unit)
            widths = {name: None} if name is not None else {}
        assert widths, f"unit {unit.number} fits on no node"
        if self._reserved is not None and self._reserved[0] == unit.number:
            self._reserved = None
        first, *others = [self._take_on(name, unit, width) for name, width in widths.items()]
        ours = replace(first, others=tuple(others))
        self._nodes[first.node].rename(first, ours)
        return ours

    def _take_on(self, name: str, unit: Unit, width: int | None) -> Lease:
        node = self._nodes[name]
        lease = node.leases.take(unit, width)
        node.files.add(unit.file)
        ours = replace(lease, node=name)
        node.held[id(ours)] = ours, lease
        return ours

    def give_back(self, lease: Lease) -> None:
        """Frees a lease on all of its nodes. That of a node which is lost is gone already."""
        for part in lease.parts:
            node = self._nodes.get(part.node)
            if node is not None and id(part) in node.held:
                _, theirs = node.held.pop(id(part))
                node.leases.give_back(theirs)

    def learn_ports(self, file: str, ports: frozenset[int]) -> None:
        """A test of this file found a port in use: from now on, its tests run one by one on each node."""
        self._learned.append((file, ports))
        for node in self._nodes.values():
            node.leases.learn_ports(file, ports)

    def quarantine(self, name: str) -> None:
        """The memory of the devices of nodes is not checked."""

    def can_ever_fit(self, unit: Unit) -> bool:
        """Nodes may come."""
        return True

    def close(self) -> None:
        """There is nothing to leave to others."""

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

    def _choose_all(self, unit: Unit) -> dict[str, int | None]:
        """How much of several nodes a unit gets, in order: of as few nodes as possible, evenly; all or nothing."""
        width = self._width(unit)
        free = {
            name: room
            for name, node in self._usable()
            if (room := node.free(unit)) and self._is_open_to(name, unit) and node.leases.may_run_now(unit)
        }
        chosen: list[str] = []
        for name in sorted(free, key=lambda one: (-free[one], unit.file not in self._nodes[one].files, one)):
            if sum(free[one] for one in chosen) < width:
                chosen.append(name)
        if sum(free[one] for one in chosen) < width:
            return {}
        shares: dict[str, int] = {}
        for at, name in enumerate(sorted(chosen, key=lambda one: free[one])):
            left = width - sum(shares.values())
            shares[name] = min(free[name], -(-left // (len(chosen) - at)))
        return {name: shares[name] for name in sorted(shares)}

    def _is_open_to(self, name: str, unit: Unit) -> bool:
        return self._reserved is None or name not in self._reserved[1] or self._reserved[0] == unit.number


class _Node:
    """The leases of one node, and which files are open there."""

    def __init__(self, leases: Leases, devices: int, slots: int):
        self.leases = leases
        self.devices, self.slots = devices, slots
        self.files: set[str] = set()
        self.draining = False
        self.held: dict[int, tuple[Lease, Lease]] = {}  # by identity: a lease with its node, and as the node knows it

    def rename(self, lease: Lease, ours: Lease) -> None:
        """A lease is known by another object from now on."""
        _, theirs = self.held.pop(id(lease))
        self.held[id(ours)] = ours, theirs

    def size(self, unit: Unit) -> int:
        return self.devices if unit.devices else self.slots

    def free(self, unit: Unit) -> int:
        return self.leases.free_devices if unit.devices else self.leases.free_slots
