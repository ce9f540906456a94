"""Traffic of a world: the bytes that each rank sends to each other.

What a backend sends depends on its algorithm: a call counts as the least that each rank must send, spread evenly over
the others. So an all_reduce counts as a reduce_scatter and an all_gather.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping

from torch_testing_ext._collectives.records.issued_calls import Call
from torch_testing_ext._collectives.records.rank_facts import bytes_of

from .world_records import RankClass, RankStep, WorldRecords
from .world_views import WorldCall, WorldClass, WorldView

# Rows and columns of a matrix that is shown.
_MOST_BLOCKS = 32
# Calls of a class, and classes, in the view of a world.
_MOST_CALLS = 2_000
_MOST_CLASSES = 32
_FROM_ROOT = ("broadcast", "scatter")
_TO_ROOT = ("reduce", "gather", "gather_into_tensor")


class _Sent:
    """The bytes that a rank sends in a group: to each other member alike, and to single ones by their places."""

    def __init__(self, calls: Iterable[Call], own: int, size: int):
        self.to_each = 0.0
        self.to: Counter[int] = Counter()
        for call in calls:
            self._add(call, bytes_of(call), own, size)

    def _add(self, call: Call, amount: int, own: int, size: int) -> None:
        if call.is_p2p and call.peer is not None:
            self.to[call.peer] += amount
        elif call.kind in _TO_ROOT and call.root is not None:
            self.to[call.root] += amount
        elif call.exchange is not None:
            elements, _ = call.exchange
            for place, count_of in enumerate(elements):
                self.to[place] += amount * count_of // max(1, sum(elements))
        elif call.kind not in _FROM_ROOT or call.root == own:
            shares = {"all_reduce": 2 / size, "all_reduce_coalesced": 2 / size, "scatter": 1 / size}
            share = 1 / size if call.kind.startswith("reduce_scatter") else shares.get(call.kind, 1.0)
            self.to_each += amount * share


def traffic(world: WorldRecords, block: int = 1) -> list[list[int]]:
    """The bytes from each block of neighbouring ranks to each."""
    blocks = -(-len(world.records) // block)
    sums = [[0.0] * blocks for _ in range(blocks)]
    # Ranks of a class share their calls, so they have sent the same if they have the same place in the group.
    known: dict[tuple[int, int, int], _Sent] = {}
    for record in world.records:
        row = sums[record.rank // block]
        for by_key in (record.calls, record.messages):
            for key, calls in by_key.items():
                group = record.groups[key]
                size = len(group.members)
                sent = known.get((id(calls), group.index, size))
                if sent is None:
                    sent = known[id(calls), group.index, size] = _Sent(calls, group.index, size)
                if sent.to_each:
                    for number, members in _blocks_of(group.members, block).items():
                        others = members - (number == record.rank // block)
                        row[number] += sent.to_each * others
                for place, amount in sent.to.items():
                    if place != group.index and place < size:
                        row[group.members[place] // block] += amount
    return [[round(amount) for amount in row] for row in sums]


@functools.lru_cache(maxsize=4096)
def _blocks_of(members: tuple[int, ...], block: int) -> Mapping[int, int]:
    """Count the members of a group in each block."""
    return Counter(member // block for member in members)


def view_of(world: WorldRecords, chain: int, not_judged: Iterable[str], with_calls: bool) -> WorldView:
    """The world as reports show it: folded to few rows, with the calls of each class if they are asked for."""
    size = len(world.records)
    block = 1
    while size > block * _MOST_BLOCKS:
        block *= 2
    classes = []
    for alike in world.classes[:_MOST_CLASSES]:
        issued = [step for step in alike.steps if step.call is not None]
        calls = [_seen(world, alike, step) for step in issued[:_MOST_CALLS]] if with_calls else []
        classes.append(WorldClass(tuple(alike.ranks), len(issued), tuple(calls)))
    rows = tuple(map(tuple, traffic(world, block)))
    return WorldView(size, block, rows, tuple(classes), chain, tuple(not_judged))


def _seen(world: WorldRecords, alike: RankClass, step: RankStep) -> WorldCall:
    first, call = alike.ranks[0], step.call
    assert call is not None
    group = world.records[first].groups[world.keys[first][step.slot]]
    return WorldCall(str(call), group.title, bytes_of(call), str(call.site or ""))
