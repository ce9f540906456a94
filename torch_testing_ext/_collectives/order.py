"""Collectives of overlapping groups that ranks have issued in opposite orders, although it passed this time."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise

from torch_testing_ext._process.words import list_of

from .findings import Finding, FindingKind
from .records import Call, GroupKey, RankRecord, SharedGroup, shared_groups, whole

_MOST_STARTS = 50  # of the search for a shortest cycle
_Node = tuple[GroupKey, int]  # a collective: its group, and its place there


def first_inversion(records: Sequence[RankRecord]) -> Finding | None:
    """A shortest cycle among the collectives of all ranks: each comes before the next one on some rank.

    The calls of each thread of a rank are ordered; those of two threads may be in any order, and wait for each other
    nowhere. Calls that lack a member are left out.
    """
    by_rank = whole(records)
    groups = {group.key: group for group in shared_groups(records) if by_rank.keys() >= set(group.ranks)}
    lines: dict[tuple[int, int], list[tuple[_Node, Call]]] = {}
    for key, group in groups.items():
        number = min(len(by_rank[rank].calls.get(key, ())) for rank in group.ranks)
        for rank in group.ranks:
            for call in by_rank[rank].calls.get(key, ())[:number]:
                lines.setdefault((rank, call.thread), []).append(((key, call.place), call))
    edges: dict[_Node, dict[_Node, tuple[int, Call, Call]]] = {}
    for (rank, _), calls in lines.items():
        calls.sort(key=lambda one: one[1].order)
        for (first, earlier), (second, later) in pairwise(calls):
            edges.setdefault(first, {}).setdefault(second, (rank, earlier, later))
    cycle = _shortest_cycle(edges)
    return _inversion(cycle, edges, groups) if cycle else None


def _shortest_cycle(edges: Mapping[_Node, Mapping[_Node, object]]) -> list[_Node]:
    best: list[_Node] = []
    for start in sorted(_on_cycles(edges))[:_MOST_STARTS]:
        path = _way_back(start, edges)
        if path and (not best or len(path) < len(best)):
            best = path
        if len(best) == 2:
            break
    return best


def _on_cycles(edges: Mapping[_Node, Mapping[_Node, object]]) -> set[_Node]:
    """The nodes that are left when those without a predecessor, or without a successor, are taken away in turn."""
    left = {*edges, *(node for each in edges.values() for node in each)}
    before: dict[_Node, set[_Node]] = {node: set() for node in left}
    after = {node: set(edges.get(node, ())) for node in left}
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


def _way_back(start: _Node, edges: Mapping[_Node, Mapping[_Node, object]]) -> list[_Node]:
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


def _inversion(
    cycle: Sequence[_Node],
    edges: Mapping[_Node, Mapping[_Node, tuple[int, Call, Call]]],
    groups: Mapping[GroupKey, SharedGroup],
) -> Finding:
    parts, lines, ranks = [], [], []
    for at, node in enumerate(cycle):
        following = cycle[(at + 1) % len(cycle)]
        rank, first, second = edges[node][following]
        one, other = groups[node[0]].title, groups[following[0]].title
        parts.append(f"rank {rank} issues {first.name} of {one} before {second.name} of {other}")
        lines.append(f"rank {rank}: {first} of {one}   {first.site}, then {second} of {other}   {second.site}")
        ranks.append(rank)
    what = f"{list_of(sorted(set(ranks)))} issue collectives in opposite orders: {', '.join(parts)}"
    return Finding(FindingKind.ORDER, what, tuple(lines), tuple(ranks))
