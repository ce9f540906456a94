"""Progress of a world: each rank goes on as a real one would, until all have ended or nobody can go on.

A collective is over when all members have issued it, a message when both of its ranks have. If sends are buffered, a
rank does not wait for that in a send. A rank waits in a call that blocks, and where its host waits. Each call
is looked at once, and each wait once more for what ends it.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from torch_testing_ext._collectives.findings.deadlocks import describe_deadlock
from torch_testing_ext._collectives.findings.finding import Doing, Finding, FindingKind
from torch_testing_ext._collectives.findings.message_pairs import Wait
from torch_testing_ext._collectives.findings.mismatches import first_mismatch
from torch_testing_ext._collectives.findings.uneven_calls import first_unmatched
from torch_testing_ext._collectives.records.issued_calls import GroupKey, RankRecord, SharedGroup
from torch_testing_ext._collectives.sanitizer.sanitizer_log import ALL, HostWait
from torch_testing_ext._tests.outcomes import TestOutcome

from .group_differences import first_group_difference
from .world_records import RankStep, WorldRecords, order_of

# What ends a call: a group's number and place there, or the parts of a message.
_Event = tuple[Any, ...]


class Progress:
    """The way of all ranks through what they have done. `chain`: the most calls that each had to wait for another."""

    def __init__(self, world: WorldRecords, buffered: bool):
        self._world = world
        self._buffered = buffered
        self._groups = _shared(world)
        self._at = [0] * len(world.records)
        # The number of members that have come to each event, and of the calls before it.
        self._arrived: Counter[_Event] = Counter()
        self._depths: dict[_Event, int] = {}
        self._happened: set[_Event] = set()
        self._waiting: dict[_Event, list[int]] = defaultdict(list)
        # What each rank has issued that is not over, by the order of the calls; and the calls before where it is.
        self._open: list[dict[int, _Event]] = [{} for _ in world.records]
        self._depth = [0] * len(world.records)
        self._blocked: dict[int, tuple[_Event, RankStep, HostWait | None]] = {}
        # Inboxes that a rank receives from any other in: messages are counted there.
        self._from_any = self._inboxes_of_any()
        self._sent: Counter[_Event] = Counter()
        self._received: Counter[_Event] = Counter()
        self._ready = deque(range(len(world.records)))
        while self._ready:
            self._go_on(self._ready.popleft())
        self.chain = max(self._depths.values(), default=0)

    def _inboxes_of_any(self) -> set[_Event]:
        inboxes = set()
        for alike in self._world.classes:
            for slot, calls in alike.messages.items():
                for tag in {call.tag for call in calls if call.kind == "recv" and call.peer is None}:
                    for rank in alike.ranks:
                        group = self._groups[rank][slot]
                        inboxes.add((group.number, group.shared.ranks.index(rank), tag))
        return inboxes

    def _go_on(self, rank: int) -> None:
        """Go through the steps of a rank until it has to wait."""
        steps = self._world.class_of[rank].steps
        while self._at[rank] < len(steps):
            step = steps[self._at[rank]]
            if step.call is not None:
                event = self._issue(rank, step)
                self._at[rank] += 1
                if event is not None:
                    self._open[rank][step.call.order] = event
                    if step.call.blocks and not self._is_over(rank, step.call.order, None):
                        return
            elif step.wait is not None:
                awaited = list(self._open[rank]) if step.wait.awaited == ALL else [step.wait.awaited]
                if not all(self._is_over(rank, order, step.wait) for order in awaited):
                    return
                self._at[rank] += 1

    def _is_over(self, rank: int, order: int, wait: HostWait | None) -> bool:
        """Whether a call of a rank is over. If not, the rank waits for it."""
        event = self._open[rank].get(order)
        if event is None:
            return True
        if event in self._happened:
            del self._open[rank][order]
            self._depth[rank] = max(self._depth[rank], self._depths[event])
            return True
        self._waiting[event].append(rank)
        self._blocked[rank] = event, self._world.class_of[rank].by_order[order], wait
        return False

    def _issue(self, rank: int, step: RankStep) -> _Event | None:
        """Issue a call. Returns what ends it; None if it is over at once."""
        call = step.call
        assert call is not None
        group = self._groups[rank][step.slot]
        if not call.is_p2p:
            event: _Event = (group.number, call.place)
            self._arrive(event, rank, len(group.shared.ranks))
            return event
        is_sent = call.kind == "send"
        target, source = (call.peer, group.own) if is_sent else (group.own, call.peer)
        inbox: _Event = (group.number, target, call.tag)
        if inbox in self._from_any:
            # Which send belongs to which receive is not known: they are counted, and nobody waits in a send.
            counted = self._sent if is_sent else self._received
            counted[inbox] += 1
            message: _Event = (*inbox, counted[inbox])
        else:
            message = (*inbox, source, call.place)
        self._arrive(message, rank, 2)
        return None if is_sent and (self._buffered or inbox in self._from_any) else message

    def _arrive(self, event: _Event, rank: int, members: int) -> None:
        self._arrived[event] += 1
        self._depths[event] = max(self._depths.get(event, 0), self._depth[rank] + 1)
        if self._arrived[event] == members:
            self._happen(event, self._depths[event])

    def _happen(self, event: _Event, depth: int) -> None:
        self._happened.add(event)
        self._depths[event] = depth
        for rank in self._waiting.pop(event, ()):
            del self._blocked[rank]
            self._depth[rank] = max(self._depth[rank], depth)
            # Where the host waits, the rank looks again at all that it waits for.
            self._ready.append(rank)

    def finding(self) -> Finding | None:
        """The ranks that cannot go on: those that others have abandoned, or a cycle. None if all have ended."""
        stuck: dict[int, Wait] = {}
        missing: dict[_Event, tuple[int, ...]] = {}
        notes: dict[int, str] = {}
        for rank, (event, step, wait) in sorted(self._blocked.items()):
            assert step.call is not None
            group = self._groups[rank][step.slot].shared
            if event not in missing:
                missing[event] = tuple(self._missing(rank, step))
            call = step.call
            if wait is not None and wait.site != call.site:
                notes[rank] = f", issued at {call.line}"
                call = replace(call, site=wait.site)
            stuck[rank] = Wait(rank, group, call, missing[event], any_of=call.is_p2p and call.peer is None)
        if not stuck:
            return None
        ended = {rank: TestOutcome.PASSED.value for rank in range(len(self._at)) if rank not in self._blocked}
        found = describe_deadlock(stuck, ended, records=self._world.records)
        lines = [
            line._replace(did=line.did + notes.get(line.rank, "")) if isinstance(line, Doing) else line
            for line in found.lines
        ]
        return replace(found, lines=tuple(lines))

    def reached(self) -> list[RankRecord]:
        """Collect what the ranks have issued when nobody can go on: real ones would not come to the rest."""
        records = []
        for rank, record in enumerate(self._world.records):
            rest = self._world.class_of[rank].steps[self._at[rank] :]
            if rest:
                calls, messages = (
                    {key: [call for call in issued if call.order < order_of(rest[0])] for key, issued in by_key.items()}
                    for by_key in (record.calls, record.messages)
                )
                record = replace(record, calls=calls, messages=messages)
            records.append(record)
        return records

    def _missing(self, rank: int, step: RankStep) -> Iterator[int]:
        """The ranks that have not come to a call."""
        call, group = step.call, self._groups[rank][step.slot]
        assert call is not None
        ranks = group.shared.ranks
        if call.is_p2p:
            yield from [other for other in ranks if other != rank] if call.peer is None else [ranks[call.peer]]
            return
        for other in ranks:
            slot = self._world.keys[other].index(group.shared.key)
            if self._has_issued(other, slot) < call.place:
                yield other

    def _has_issued(self, rank: int, slot: int) -> int:
        done = self._world.class_of[rank].steps[: self._at[rank]]
        return sum(step.slot == slot and step.call is not None and not step.call.is_p2p for step in done)


class _Group(NamedTuple):
    """A group of a rank. `number`: that among all groups of the world; `own`: the rank's place in it."""

    number: int
    own: int
    shared: SharedGroup


def _shared(world: WorldRecords) -> list[list[_Group]]:
    """The groups of each rank."""
    numbers: dict[tuple[GroupKey, tuple[int, ...]], tuple[int, SharedGroup]] = {}
    groups = []
    for record, keys in zip(world.records, world.keys, strict=True):
        of_rank = []
        for key in keys:
            group = record.groups[key]
            identity = key, group.members
            if identity not in numbers:
                numbers[identity] = len(numbers), SharedGroup(key, group.title, group.members)
            of_rank.append(_Group(numbers[identity][0], group.index, numbers[identity][1]))
        groups.append(of_rank)
    return groups


def judge(world: WorldRecords, progress: Progress, is_cut: bool = False, may_differ: bool = False) -> Finding | None:
    """The first fault of a world: groups, what must agree, ranks that cannot go on, calls that lack a partner.

    `is_cut`: some ranks have ended early, since they would have judged values that nobody has communicated. Then only
    what ranks have done counts: calls that disagree, and cycles. `may_differ`: ranks may issue other calls.
    """
    if may_differ:
        return progress.finding()
    if is_cut:
        found = first_mismatch(world.records) or progress.finding()
        is_real = found is not None and found.kind in (FindingKind.MISMATCH, FindingKind.DEADLOCK)
        return found if is_real else None
    return (
        first_group_difference(world)
        or first_mismatch(progress.reached())
        or progress.finding()
        or first_unmatched(world.records)
    )
