"""Ranks of one job on several nodes: a block of consecutive ranks on each, as torchrun places them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Room:
    """Room for some ranks on a node."""

    node: str
    ranks: int
    address: str


@dataclass(frozen=True)
class Block:
    """The ranks of a job on one node, and how they meet those of the others."""

    group: int  # the number of the node, as torchrun calls it
    groups: int
    node: str
    first: int
    count: int
    address: str  # of the first node, where the store is
    port: int
    peer: str  # the address of another node: the route to it shows which interface to use
    keeps_interface: bool = False  # the user has chosen one

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.count)

    def environ_of(self, rank: int, world_size: int) -> dict[str, str]:
        """The variables by which torchrun tells a rank its place. `env://` finds the store that is there already."""
        numbers = {
            "RANK": rank,
            "ROLE_RANK": rank,
            "LOCAL_RANK": rank - self.first,
            "GROUP_RANK": self.group,
            "WORLD_SIZE": world_size,
            "ROLE_WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": self.count,
            "GROUP_WORLD_SIZE": self.groups,
            "MASTER_PORT": self.port,
        }
        texts = {"MASTER_ADDR": self.address, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        return {**texts, **{name: str(number) for name, number in numbers.items()}}


def split(world_size: int, rooms: Sequence[int]) -> list[range]:
    """The ranks of each node: as many as there is room for, node by node; more than that in proportion."""
    total = sum(rooms)
    ends, filled = [], 0
    for room in rooms:
        filled += room
        ends.append(filled if world_size <= total else filled * world_size // total)
    starts = [0, *ends[:-1]]
    ranges = [range(min(a, world_size), min(b, world_size)) for a, b in zip(starts, ends, strict=True)]
    return [one for one in ranges if one]


def blocks_of(
    world_size: int, rooms: Sequence[Room], port: int = 0, keeps_interface: bool = False
) -> tuple[Block, ...]:
    """The blocks of a job; none if all of its ranks find room on the first node."""
    ranges = split(world_size, [room.ranks for room in rooms])
    if len(ranges) < 2:
        return ()
    return tuple(
        Block(
            group,
            len(ranges),
            rooms[group].node,
            ranks.start,
            len(ranks),
            rooms[0].address,
            port,
            rooms[0 if group else 1].address,
            keeps_interface,
        )
        for group, ranks in enumerate(ranges)
    )
