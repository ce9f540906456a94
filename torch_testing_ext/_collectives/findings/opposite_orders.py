"""Calls that ranks have issued in opposite orders, although it passed: of overlapping groups, and messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from torch_testing_ext._collectives.records.issued_calls import (
    Call,
    GroupKey,
    RankRecord,
    SharedGroup,
    shared_groups,
    whole_records,
)
from torch_testing_ext._process.words import list_of

from .finding import Finding, FindingKind
from .message_pairs import Wait, pairs_of

# The most nodes from which a shortest cycle is searched.
_MOST_STARTS = 50
# A collective: its group, and its place there. A message: its group, and a number below 0.
_Node = tuple[GroupKey, int]


class _Edge(NamedTuple):
    """Two calls that a rank has issued one after the other."""

    rank: int
    earlier: Call
    later: Call


_Edges = Mapping[_Node, Mapping[_Node, _Edge]]
# A call of a rank.
_NodeOfRank: TypeAlias = tuple[_Node, Call]


def first_inversion(records: Sequence[RankRecord]) -> Finding | None:
    """A shortest cycle among the calls of all ranks: each comes before the next one on some rank.

    The calls of each thread of a rank are ordered; those of two threads may be in any order, and wait for each other
    nowhere. So may messages between two collectives: ranks in a ring all send first. Calls that lack a member are left
    out.
    """
    by_rank = whole_records(records)
    groups = {group.key: group for group in shared_groups(records) if by_rank.keys() >= set(group.ranks)}
    edges: dict[_Node, dict[_Node, _Edge]] = {}
    for rank, calls in _calls_of_threads(records, by_rank, groups):
        for (first, earlier), (second, later) in _ordered_pairs(calls):
            edges.setdefault(first, {}).setdefault(second, _Edge(rank, earlier, later))
    cycle = _shortest_cycle(edges)
    return _inversion(cycle, edges, groups) if cycle else None


def _calls_of_threads(
    records: Sequence[RankRecord], by_rank: Mapping[int, RankRecord], groups: Mapping[GroupKey, SharedGroup]
) -> Iterator[tuple[int, list[_NodeOfRank]]]:
    """The calls of each thread of each rank in their order, as far as all members have issued them."""
    of_threads: dict[tuple[int, int], list[_NodeOfRank]] = {}
    for key, group in groups.items():
        calls_of = {rank: by_rank[rank].calls.get(key, ()) for rank in group.ranks}
        number = min(map(len, calls_of.values()))
        for rank, calls in calls_of.items():
            for call in calls[:number]:
                of_threads.setdefault((rank, call.thread), []).append(((key, call.place), call))
    for number, pair in enumerate(pairs_of(records), 1):
        for rank, call in ((pair.source, pair.send), (pair.target, pair.receive)):
            of_threads.setdefault((rank, call.thread), []).append(((pair.group.key, -number), call))
    for (rank, _), of_thread in of_threads.items():
        yield rank, sorted(of_thread, key=lambda pair: pair[1].order)


def _ordered_pairs(calls: Iterable[_NodeOfRank]) -> Iterator[tuple[_NodeOfRank, _NodeOfRank]]:
    """The calls of a thread of which the first comes before the second: at least one of them is a collective."""
    before: list[_NodeOfRank] = []
    messages: list[_NodeOfRank] = []
    for issued in calls:
        _, call = issued
        if call.is_p2p:
            yield from ((earlier, issued) for earlier in before)
            messages.append(issued)
        else:
            yield from ((earlier, issued) for earlier in (*before, *messages))
            before, messages = [issued], []


def _shortest_cycle(edges: _Edges) -> list[_Node]:
    """A shortest cycle from one of the first nodes on cycles; [] if there is none."""
    best: list[_Node] = []
    for start in sorted(_on_cycles(edges))[:_MOST_STARTS]:
        path = _way_back(start, edges)
        if path and (not best or len(path) < len(best)):
            best = path
        if len(best) == 2:
            break
    return best


def _on_cycles(edges: _Edges) -> set[_Node]:
    """The nodes that are left when those without a predecessor, or without a successor, are taken away in turn."""
    left = {*edges, *(node for nexts in edges.values() for node in nexts)}
    after = {node: set(edges.get(node, ())) for node in left}
    before: dict[_Node, set[_Node]] = {node: set() for node in left}
    for node, nexts in after.items():
        for following in nexts:
            before[following].add(node)
    for ways, back in ((before, after), (after, before)):
        free = deque(node for node in left if not ways[node])
        while free:
            node = free.popleft()
            left.discard(node)
            for other in back[node]:
                ways[other].discard(node)
                if not ways[other] and other in left:
                    free.append(other)
            back[node] = set()
    return left


def _way_back(start: _Node, edges: _Edges) -> list[_Node]:
    """The shortest way from a node to itself, without its end."""
    came: dict[_Node, _Node] = {}
    waiting = deque([start])
    while waiting:
        node = waiting.popleft()
        for following in edges.get(node, ()):
            if following == start:
                path = [node]
                while path[-1] != start:
                    path.append(came[path[-1]])
                return path[::-1]
            if following not in came:
                came[following] = node
                waiting.append(following)
    return []


def _inversion(cycle: Sequence[_Node], edges: _Edges, groups: Mapping[GroupKey, SharedGroup]) -> Finding:
    """The finding about a cycle: what each rank on it issues before what."""
    parts = []
    lines = []
    ranks = []
    for node, following in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        rank, earlier, later = edges[node][following]
        group, next_group = groups[node[0]], groups[following[0]]
        first, second = Wait(rank, group, earlier, ()), Wait(rank, next_group, later, ())
        parts.append(f"rank {rank} issues {first.name} of {group.title} before {second.name} of {next_group.title}")
        titles = f"{first.title} of {group.title}   {earlier.site}, then {second.title} of {next_group.title}"
        lines.append(f"rank {rank}: {titles}   {later.site}")
        ranks.append(rank)
    has_messages = any(place < 0 for _, place in cycle)
    what = "messages and collectives" if has_messages else "collectives"
    sentence = f"{list_of(sorted(set(ranks)))} issue {what} in opposite orders: {', '.join(parts)}"
    return Finding(FindingKind.ORDER, sentence, tuple(lines), tuple(ranks))
