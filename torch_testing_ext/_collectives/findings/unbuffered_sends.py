"""Ranks that would wait for each other if a send returned only when its message is received.

Pure.

The calls that the ranks have issued are gone through again, each when it may begin. Work that a rank does not wait for
at once, and what lacks a partner, keeps nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch_testing_ext._collectives.records.issued_calls import (
    Call,
    RankRecord,
    SharedGroup,
    shared_groups,
    whole_records,
)

from .deadlocks import describe_deadlock
from .finding import Finding, FindingKind
from .message_pairs import Wait, pairs_of

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
        """Begin calls until one has to wait. Returns whether anything has changed."""
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
