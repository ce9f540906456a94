"""Findings that need all calls: opposite orders, tensors that part, sends that are not buffered."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from torch_testing_ext._process.words import grouped, list_of, verb_for

from .failure import Site
from .findings import Doing, Finding, FindingKind, Wait, describe_deadlock, pairs_of
from .records import Call, GroupKey, GroupRecord, RankRecord, SharedGroup, shared_groups, whole_records


def finding_of_rank(rank: int, note: Mapping[str, Any]) -> Finding:
    """The finding that a rank has written into its log."""
    site = Site(*note["site"]) if note.get("site") else None
    issued = Site(*note["issued"]) if note.get("issued") else None
    sentence = f"rank {rank}: {note['text']}"
    if site:
        sentence += f" ({site})"
    if issued:
        sentence += f", issued at {issued}"
    return Finding(FindingKind(note["kind"]), sentence, (Doing(rank, note["text"], site),), (rank,))


# --------------------------------------------------------------------------------------------------------------------
# Collectives of overlapping groups, and messages, that ranks have issued in opposite orders, although it passed.

# Of the search for a shortest cycle.
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


# --------------------------------------------------------------------------------------------------------------------
# The first tensor in which ranks part that must hold it alike: parameters of DDP, replicated DTensors. Pure.
#
# A difference counts only if it stays until the last look. Ranks that average now and then differ in between.

# Digest, shape, is it a buffer.
Sum: TypeAlias = tuple[int | None, list[int], bool]
# The point of a look at the end of a test.
END = -1


class Look(NamedTuple):
    """The digests of the tensors of a model at one point: 2n before the n-th step, 2n + 1 after it.

    `model`: its kind, its number among those of the group, and the group, by texts that are alike on all members.
    """

    model: str
    point: int
    # File, line, function.
    site: Sequence[Any] | None
    sums: Mapping[str, Sum]


class _Parted(NamedTuple):
    """A tensor from the point on at which ranks have parted, with their looks there."""

    is_buffer: bool
    # The number of the first rank's look among its looks.
    order: int
    name: str
    looks: Mapping[int, Look]

    @property
    def gravity(self) -> tuple[bool, int]:
        """Of several, the one with the smallest comes first: a parameter before a buffer, then the earlier look."""
        return self.is_buffer, self.order


def first_parted(looks: Mapping[int, Sequence[Look]]) -> Finding | None:
    """The first tensor in which ranks have parted for good; `looks` are those of each rank, in order."""
    by_model: dict[str, dict[int, dict[int, Look]]] = {}
    order: dict[int, int] = {}
    for rank, of_rank in sorted(looks.items()):
        for number, look in enumerate(of_rank):
            by_model.setdefault(look.model, {}).setdefault(rank, {})[look.point] = look
            order[id(look)] = number
    firsts: list[tuple[_Parted, int]] = []
    for by_rank in by_model.values():
        parted = [_parted_at(name, point, by_rank, order) for name, point in _parted(by_rank)]
        if parted:
            firsts.append((min(parted, key=_gravity), len(parted) - 1))
    if not firsts:
        return None
    first, others = min(firsts, key=lambda pair: pair[0].gravity)
    return _finding(first.name, first.looks, others)


def _gravity(parted: _Parted) -> tuple[bool, int]:
    return parted.gravity


def _parted_at(name: str, point: int, by_rank: Mapping[int, Mapping[int, Look]], order: Mapping[int, int]) -> _Parted:
    """The looks of all ranks at a point that know this tensor."""
    looks = {rank: of_rank[point] for rank, of_rank in by_rank.items() if name in of_rank[point].sums}
    first = next(iter(looks.values()))
    _, _, is_buffer = first.sums[name]
    return _Parted(is_buffer, order[id(first)], name, looks)


def _parted(by_rank: Mapping[int, Mapping[int, Look]]) -> Iterator[tuple[str, int]]:
    """Each tensor of a model that differs until the last look, with the point from which on it does."""
    first = next(iter(by_rank.values()))
    points = [point for point in first if all(point in of_rank for of_rank in by_rank.values())]
    while points and points[-1] % 2 and points[-1] != END:
        # Nobody has looked again, so the ranks may have averaged after this step.
        points.pop()
    if not points:
        return
    for name in first[points[0]].sums:
        differs = [_differ(name, [of_rank[point] for of_rank in by_rank.values()]) for point in points]
        if True not in differs:
            continue
        start = differs.index(True)
        if all(differs[start:]) and points[start:] != [END]:
            yield name, points[start]


def _differ(name: str, looks: Sequence[Look]) -> bool:
    digests = {look.sums[name][0] for look in looks if name in look.sums}
    return len(digests - {None}) > 1


def _finding(name: str, looks: Mapping[int, Look], others: int) -> Finding:
    """The finding about a tensor, and how many others there are."""
    by_digest = grouped((look.sums[name][0], rank) for rank, look in looks.items())
    few, *rest = sorted(by_digest.values(), key=len)
    first = looks[few[0]]
    _, shape, is_buffer = first.sums[name]
    kind, _, group = first.model.split(" ", 2)
    group_name, description, members, _, _ = json.loads(group)
    title = GroupRecord(group_name, description, tuple(members), 0).title
    if len(rest) == 1:
        who = f"{list_of(few)} {verb_for(few, 'has', 'have')} diverged from {list_of(rest[0])}"
    else:
        who = f"{list_of(list(looks))} have diverged from each other"
    more = ""
    if others:
        more = f" and {others} more tensor{'s' if others > 1 else ''}"
    sentence = f"{who} {_when(first.point)}: {name} {list(shape)}{more} ({kind} in {title})"
    if is_buffer:
        sentence += "; the next forward overwrites it with that of rank 0"
    lines = []
    for rank, look in looks.items():
        digest = look.sums[name][0] or 0
        site = Site(*look.site) if look.site else None
        lines.append(Doing(rank, f"{name} is {digest:08x}", site))
    return Finding(FindingKind.PARTED, sentence, tuple(lines), tuple(few), is_hazard=is_buffer)


def _when(point: int) -> str:
    step, is_after = divmod(point, 2)
    if is_after:
        return f"in step {step}"
    return f"between steps {step - 1} and {step}" if step > 1 else "before step 1"


# --------------------------------------------------------------------------------------------------------------------
# Ranks that would wait for each other if a send returned only when its message is received. Pure.
#
# The calls that the ranks have issued are gone through again, each when it may begin. Work that a rank does not wait
# for at once, and what lacks a partner, keeps nobody.

# A rank, and the number of a call there.
_Place = tuple[int, int]


class _Step(NamedTuple):
    """A call in the program of a thread, with the calls that it waits for."""

    call: Call
    group: SharedGroup
    needed: Sequence[_Place]


class _Program:
    """The calls of a thread of a rank, in order, and how far it has come."""

    def __init__(self, rank: int, steps: Iterable[_Step]):
        self.rank = rank
        self._steps = sorted(steps, key=lambda step: step.call.order)
        self._at = 0

    @property
    def step(self) -> _Step | None:
        """The step that it has come to; None at its end."""
        return self._steps[self._at] if self._at < len(self._steps) else None

    def go_on(self, begun: set[_Place]) -> bool:
        """Begin calls until one has to wait. Has anything changed?"""
        has_changed = False
        while self.step is not None:
            place = self.rank, self.step.call.order
            if place not in begun:
                begun.add(place)
                has_changed = True
            if self.step.call.blocks and not begun.issuperset(self.step.needed):
                return has_changed
            self._at += 1
            has_changed = True
        return has_changed


def first_unbuffered(records: Sequence[RankRecord], with_messages_alone: bool) -> Finding | None:
    """The ranks that would be stuck, or None. `with_messages_alone`: also if no collective is among their calls."""
    stuck = _stuck(_programs(records))
    has_collective = any(not wait.call.is_p2p for wait in stuck.values())
    if not stuck or not (with_messages_alone or has_collective):
        return None
    deadlock = describe_deadlock(stuck, {})
    return replace(deadlock, kind=FindingKind.ORDER, sentence=f"if sends were not buffered, {deadlock.sentence}")


def _programs(records: Sequence[RankRecord]) -> list[_Program]:
    """The programs of all threads of all ranks."""
    steps: dict[tuple[int, int], list[_Step]] = {}

    def add(rank: int, call: Call, group: SharedGroup, needed: Sequence[_Place]) -> None:
        steps.setdefault((rank, call.thread), []).append(_Step(call, group, needed))

    for pair in pairs_of(records):
        add(pair.source, pair.send, pair.group, [(pair.target, pair.receive.order)])
        add(pair.target, pair.receive, pair.group, [(pair.source, pair.send.order)])
    by_rank = whole_records(records)
    for group in shared_groups(records):
        if not by_rank.keys() >= set(group.ranks):
            continue
        calls_of_all = [by_rank[rank].calls.get(group.key, ()) for rank in group.ranks]
        for calls in zip(*calls_of_all, strict=False):
            by_member = list(zip(group.ranks, calls, strict=True))
            places = [(rank, call.order) for rank, call in by_member]
            for rank, call in by_member:
                add(rank, call, group, places)
    return [_Program(rank, of_thread) for (rank, _), of_thread in steps.items()]


def _stuck(programs: Sequence[_Program]) -> Mapping[int, Wait]:
    """Go through the programs until none goes on. The ranks that are left, each with what it waits in."""
    begun: set[_Place] = set()
    has_changed = True
    while has_changed:
        has_changed = False
        for program in programs:
            if program.go_on(begun):
                has_changed = True
    waits = {}
    for program in programs:
        step = program.step
        if step is not None:
            missing = tuple(rank for rank, order in step.needed if (rank, order) not in begun)
            waits[program.rank] = Wait(program.rank, step.group, step.call, missing)
    return waits
