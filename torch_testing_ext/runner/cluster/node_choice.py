"""The choice of the nodes of a Ray cluster that a run takes, and what it waits for."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple


class Room(NamedTuple):
    """The CPUs and GPUs that a node has, or has free, in whole numbers."""

    cpus: int
    gpus: int

    @classmethod
    def of(cls, resources: Mapping[str, float]) -> Room:
        return cls(int(resources.get("CPU", 0)), int(resources.get("GPU", 0)))


@dataclass(frozen=True)
class SeenNode:
    """A node of the cluster, as Ray describes it."""

    id: str
    name: str
    total: Room
    free: Room
    # Other names, and labels as NAME=VALUE.
    aliases: frozenset[str] = frozenset()
    # A resource that only this node has.
    pin: str = ""
    drains: bool = False


class HeldState(enum.Enum):
    """The state of a node of which the run holds a part."""

    RESERVES = "Ray reserves what the run wants of it"
    STARTS = "its agent starts"
    JOINED = "its agent runs"
    ENDS = "its agent ends"
    GONE = "it was given back"


@dataclass(frozen=True)
class Wish:
    """The nodes that a run wants."""

    address: str
    # Exactly so many; None for all that have something free.
    nodes: int | None
    # The GPUs to use of each node; None for all.
    gpus: int | None
    # The most CPUs to use of each node; None for all.
    cpus: int | None
    # Names and labels of nodes.
    only: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    @property
    def each(self) -> str:
        return f"{self.gpus} GPUs and a CPU" if self.gpus else "a CPU"

    def suits(self, room: Room) -> bool:
        return room.cpus >= 1 and room.gpus >= (self.gpus or 0)

    def part_of(self, room: Room) -> Room:
        cpus = room.cpus if self.cpus is None else min(room.cpus, self.cpus)
        gpus = room.gpus if self.gpus is None else self.gpus
        return Room(cpus, gpus)

    def names(self, node: SeenNode) -> bool:
        """Whether cluster.only and cluster.not choose a node."""
        if self.only and not _is_one_of(node, self.only):
            return False
        return not _is_one_of(node, self.exclude)


def _is_one_of(node: SeenNode, patterns: Iterable[str]) -> bool:
    for pattern in patterns:
        for word in pattern.split(","):
            word = word.strip()
            if word and any(fnmatchcase(name, word) for name in (node.name, *node.aliases)):
                return True
    return False


@dataclass(frozen=True)
class Choice:
    """The nodes to take now, all or none of them, and what is missing."""

    take: tuple[SeenNode, ...] = ()
    waits_for: str = ""
    # The reason why the run cannot begin, and no waiting helps.
    cannot: str = ""
    # Only more nodes help, which an autoscaler may add.
    infeasible: bool = False
    # The nodes that it has: it waits for all, and others need these meanwhile.
    gives_back: bool = False


def choose_nodes(
    wish: Wish,
    seen: Sequence[SeenNode],
    held: Mapping[str, HeldState],
    left_alone: Mapping[str, str],
    begun: bool,
) -> Choice:
    """`held` and `left_alone`, with the reasons, are by the ids of nodes. `begun`: the run has had its nodes once."""
    chosen = [node for node in seen if wish.names(node)]
    able = [node for node in chosen if node.id not in left_alone and wish.suits(node.total)]
    live = [node_id for node_id, state in held.items() if state not in (HeldState.ENDS, HeldState.GONE)]
    if not begun and len(able) < (wish.nodes or 1):
        return _too_few(wish, seen, chosen, able, left_alone, bool(live))
    free = [node for node in able if node.id not in held and not node.drains and wish.suits(node.free)]
    free.sort(key=lambda node: (-node.free.gpus, -node.free.cpus, node.name))
    missing = len(free)
    if wish.nodes is not None:
        missing = max(0, wish.nodes - len(live))
    if not begun and wish.nodes is not None and len(free) < missing:
        busy = sorted(node.name for node in able if node not in free and node.id not in live)
        return Choice(
            waits_for=f"{wish.nodes} nodes (--cluster-nodes) with {wish.each} each, all at once: {len(free)} of the "
            f"cluster's {len(seen)} have that free, and others use {', '.join(busy)}",
            gives_back=bool(live),
        )
    # All runs take them in the same order.
    taken = tuple(sorted(free[:missing], key=lambda node: node.id))
    starting = [node.name for node in taken]
    for node in seen:
        if held.get(node.id) in (HeldState.RESERVES, HeldState.STARTS):
            starting.append(node.name)
    if starting:
        return Choice(taken, f"nodes that start: {', '.join(sorted(starting))}")
    if live:
        return Choice()
    return Choice(waits_for=f"{wish.each} on one of {len(seen)} nodes, which others use")


def _too_few(
    wish: Wish,
    seen: Sequence[SeenNode],
    chosen: Sequence[SeenNode],
    able: Sequence[SeenNode],
    left_alone: Mapping[str, str],
    has_some: bool,
) -> Choice:
    """The run cannot begin with the nodes of the cluster, whoever uses them."""
    if seen and not chosen:
        names = ", ".join(sorted(node.name for node in seen))
        return Choice(cannot=f"cluster.only and cluster.not leave none of the nodes of the cluster: {names}")
    reasons = [left_alone[node.id] for node in chosen if node.id in left_alone]
    if reasons:
        return Choice(cannot="\n".join(dict.fromkeys(reasons)))
    return Choice(waits_for=_infeasible(wish, chosen, len(able)), infeasible=True, gives_back=has_some)


def _infeasible(wish: Wish, nodes: Sequence[SeenNode], able: int) -> str:
    sizes = "; ".join(f"{node.name} has {node.total.gpus} GPUs and {node.total.cpus} CPUs" for node in nodes)
    which = f"only {able} of the nodes" if able else "no node"
    needs = f"{wish.nodes} nodes with {wish.each}" if wish.nodes else wish.each
    return f"{needs}; {which} of the cluster at {wish.address} has that (INFEASIBLE, unless nodes are added): {sizes}"
