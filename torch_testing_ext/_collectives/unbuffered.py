"""Ranks that would wait for each other if a send returned only when its message is received. Pure.

The calls that the ranks have issued are gone through again, each when it may begin. Work that a rank does not wait for
at once, and what lacks a partner, keeps nobody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from .findings import Finding, FindingKind, describe_deadlock
from .pairs import Wait, pairs_of
from .records import Call, RankRecord, SharedGroup, shared_groups, whole

_Place = tuple[int, int]  # a rank, and the number of a call there
_Needs = tuple[Call, SharedGroup, Sequence[_Place]]  # a call, and those that it waits for


def first_unbuffered(records: Sequence[RankRecord], with_messages_alone: bool) -> Finding | None:
    """The ranks that would be stuck, or None. `with_messages_alone`: also if no collective is among their calls."""
    stuck = _stuck(_programs(records))
    if not stuck or not (with_messages_alone or any(not wait.call.is_p2p for wait in stuck.values())):
        return None
    found = describe_deadlock(stuck, {})
    return replace(found, kind=FindingKind.ORDER, sentence=f"if sends were not buffered, {found.sentence}")


def _programs(records: Sequence[RankRecord]) -> list[tuple[int, list[_Needs]]]:
    """The calls of each thread of each rank, in order."""
    by_rank = whole(records)
    programs: dict[tuple[int, int], list[_Needs]] = {}

    def add(rank: int, call: Call, group: SharedGroup, needed: Sequence[_Place]) -> None:
        programs.setdefault((rank, call.thread), []).append((call, group, needed))

    for pair in pairs_of(records):
        add(pair.source, pair.send, pair.group, [(pair.target, pair.receive.order)])
        add(pair.target, pair.receive, pair.group, [(pair.source, pair.send.order)])
    for group in shared_groups(records):
        if not by_rank.keys() >= set(group.ranks):
            continue
        for calls in zip(*(by_rank[rank].calls.get(group.key, ()) for rank in group.ranks), strict=False):
            places = [(rank, call.order) for rank, call in zip(group.ranks, calls, strict=True)]
            for rank, call in zip(group.ranks, calls, strict=True):
                add(rank, call, group, places)
    return [(rank, sorted(calls, key=lambda one: one[0].order)) for (rank, _), calls in programs.items()]


def _stuck(programs: Sequence[tuple[int, Sequence[_Needs]]]) -> Mapping[int, Wait]:
    """Go through the programs until none goes on. The ranks that are left, each with what it waits in."""
    begun: set[_Place] = set()
    at = [0] * len(programs)
    goes_on = True
    while goes_on:
        goes_on = False
        for number, (rank, calls) in enumerate(programs):
            while at[number] < len(calls):
                call, _, needed = calls[at[number]]
                goes_on = goes_on or (rank, call.order) not in begun
                begun.add((rank, call.order))
                if call.blocks and not begun.issuperset(needed):
                    break
                goes_on, at[number] = True, at[number] + 1
    waits = {}
    for (rank, calls), place in zip(programs, at, strict=True):
        if place < len(calls):
            call, group, needed = calls[place]
            missing = tuple(other for other, order in needed if (other, order) not in begun)
            waits[rank] = Wait(rank, group, call, missing)
    return waits
