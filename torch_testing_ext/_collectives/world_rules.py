"""Whole worlds: the logs of all ranks, none of which has communicated, and the rules that go through them. Pure."""

from __future__ import annotations

import functools
import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch_testing_ext._process.words import EndWords, count, list_of, verb_for

from .failure import Site, WorldCall, WorldClass, WorldView
from .findings import Doing, Finding, FindingKind, Wait, describe_deadlock, first_mismatch, first_unmatched
from .records import Call, GroupKey, GroupRecord, RankRecord, SharedGroup, generations
from .sanitizer_log import ALL, HostWait, LogReader

# --------------------------------------------------------------------------------------------------------------------
# What the ranks of a world have done. Ranks that have done the same are of one class, and share their calls.

_BITS = re.compile(r"\d+")
_BYTES = {"bool": 1, "complex32": 4, "complex64": 8, "complex128": 16}


class RankStep(NamedTuple):
    """A call of a rank, with the place of its group among those that the rank has made; or a wait of the host."""

    call: Call | None
    slot: int = 0
    wait: HostWait | None = None


@dataclass
class RankClass:
    """Ranks that have done the same, at the same lines, each in its own groups."""

    ranks: list[int]
    steps: list[RankStep]
    by_order: Mapping[int, RankStep]
    # Of its groups.
    sites: list[Site | None]
    # By the place of their group: collectives, and messages.
    calls: dict[int, Sequence[Call]]
    messages: dict[int, Sequence[Call]]

    def __str__(self) -> str:
        calls = count(sum(step.call is not None for step in self.steps), "call")
        return f"{list_of(self.ranks)}{verb_for(self.ranks, '', ' alike')}: {calls}"


@dataclass
class WorldRecords:
    """All that the ranks of a world have done, by rank."""

    classes: list[RankClass] = field(default_factory=list)
    records: list[RankRecord] = field(default_factory=list)
    # Of each rank: the groups that it has made, and its class.
    keys: list[list[GroupKey]] = field(default_factory=list)
    class_of: list[RankClass] = field(default_factory=list)
    _known: dict[bytes, RankClass] = field(default_factory=dict)
    _members: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)

    def add(self, logs: Iterable[LogReader]) -> None:
        """Add the logs of the next ranks, and remove their files."""
        for rank, log in enumerate(logs, len(self.records)):
            digest, groups = log.digest()
            alike = self._known.get(digest)
            if alike is None:
                alike = self._known[digest] = self._new_class(rank, log)
                self.classes.append(alike)
            alike.ranks.append(rank)
            self.class_of.append(alike)
            self.records.append(self._record(rank, groups, alike))
            log.remove()

    def _new_class(self, rank: int, log: LogReader) -> RankClass:
        content = log.read()
        assert content is not None
        if not content.is_whole:
            raise ValueError(f"rank {rank} has issued more calls than a log has room for: check a shorter part of it")
        record = content.record(rank)
        slots = {key: slot for slot, key in enumerate(_keys(content.groups))}
        calls = {slots[key]: issued for key, issued in record.calls.items()}
        messages = {slots[key]: issued for key, issued in record.messages.items()}
        steps = [RankStep(call, slot) for by_slot in (calls, messages) for slot, of in by_slot.items() for call in of]
        steps += [RankStep(None, wait=wait) for wait in content.waits]
        by_order = dict(sorted((_order(step), step) for step in steps))
        return RankClass([], list(by_order.values()), by_order, content.sites, calls, messages)

    def _record(self, rank: int, groups: Sequence[GroupRecord], alike: RankClass) -> RankRecord:
        shared = [replace(group, members=self._members.setdefault(group.members, group.members)) for group in groups]
        keys = _keys(shared)
        self.keys.append(keys)
        calls = {keys[slot]: issued for slot, issued in alike.calls.items()}
        messages = {keys[slot]: issued for slot, issued in alike.messages.items()}
        return RankRecord(rank, dict(zip(keys, shared, strict=True)), calls, True, None, messages=messages)

    # -- facts

    def issued(self, group: str | None, op: str | None) -> Iterator[list[Call]]:
        """The calls of each rank in groups of a name, of one operation."""
        for record in self.records:
            listed = [(key, calls) for by_key in (record.calls, record.messages) for key, calls in by_key.items()]
            yield [
                call
                for key, calls in listed
                if group is None or _has_name(record.groups[key], group)
                for call in calls
                if op is None or call.kind == op
            ]


def _order(step: RankStep) -> int:
    place = step.call or step.wait
    assert place is not None
    return place.order


def _keys(groups: Sequence[GroupRecord]) -> list[GroupKey]:
    used = generations(groups)
    return [GroupKey(group.name, number, "c10d", group.world) for group, number in zip(groups, used, strict=True)]


def _has_name(group: GroupRecord, name: str) -> bool:
    return name in group.names or (group.is_default and name == "world")


def bytes_of(call: Call) -> int:
    """The bytes that a rank hands over to a call; a receive has none."""
    return 0 if call.kind == "recv" else sum(map(_bytes_of, call.inputs))


def _bytes_of(tensor: str) -> int:
    """The bytes of a tensor in words, such as `[4, 8] float32`."""
    shape, _, dtype = tensor.rpartition(" ")
    elements = 1
    for size in _BITS.findall(shape):
        elements *= int(size)
    bits = _BITS.search(dtype)
    return elements * _BYTES.get(dtype, int(bits.group()) // 8 if bits else 1)


# --------------------------------------------------------------------------------------------------------------------
# Groups that ranks have made in different orders, or that some members have not made.


def first_group_difference(world: WorldRecords) -> Finding | None:
    """The first group that not all of its members have made: under its name, or at all."""
    made: dict[tuple[GroupKey, tuple[int, ...]], list[int]] = defaultdict(list)
    for record in world.records:
        for key, group in record.groups.items():
            made[key, group.members].append(record.rank)
    for (key, members), makers in made.items():
        absent = sorted(set(members).difference(makers))
        if absent:
            return _group_difference(world, key, members, makers, absent)
    return None


def _group_difference(
    world: WorldRecords, key: GroupKey, members: Sequence[int], makers: Sequence[int], absent: Sequence[int]
) -> Finding:
    known = world.records[makers[0]].groups[key]
    title = f"{known.title} of {list_of(members)}"
    lines = [Doing(rank, f"makes {title}", _site_of_group(world, rank, key)) for rank in makers]
    others = {rank: world.records[rank].groups.get(key) for rank in absent if rank < len(world.records)}
    has = verb_for(absent, "has", "have")
    sentence = f"{list_of(makers)} {verb_for(makers, 'makes', 'make')} {title}, which {list_of(absent)} {has} not made"
    unlike = {rank: group for rank, group in others.items() if group is not None}
    if unlike:
        first = next(iter(unlike))
        sentence += f": there, rank {first} makes one of {list_of(unlike[first].members)}"
    for rank, group in others.items():
        if group is None:
            lines.append(Doing(rank, f"does not make {known.title}", None))
        else:
            did = f"makes {group.title} of {list_of(group.members)}"
            lines.append(Doing(rank, did, _site_of_group(world, rank, key)))
    return Finding(FindingKind.MISMATCH, sentence, tuple(lines), tuple(absent))


def _site_of_group(world: WorldRecords, rank: int, key: GroupKey) -> Site | None:
    return world.class_of[rank].sites[world.keys[rank].index(key)]


# --------------------------------------------------------------------------------------------------------------------
# Progress: each rank goes on as a real one would, until all have ended or nobody can go on.
#
# A collective is over when all members have issued it, a receive when its message was sent, a send at once or, if sends
# are not buffered, when its message is received. A rank waits in a call that blocks, and where its host waits. Each
# call is looked at once, and each wait once more for what ends it.

# What ends a call: a group's number and place there, or the parts of a message.
_Event = tuple[Any, ...]


class Progress:
    """The way of all ranks through what they have done. `chain`: the most calls that each had to wait for another."""

    def __init__(self, world: WorldRecords, buffered: bool):
        self._world = world
        self._buffered = buffered
        self._groups = _shared(world)
        self._at = [0] * len(world.records)
        # By event: how many members have come; the calls before it.
        self._arrived: Counter[_Event] = Counter()
        self._depths: dict[_Event, int] = {}
        self._happened: set[_Event] = set()
        self._waiting: dict[_Event, list[int]] = defaultdict(list)
        # By rank: what it has issued that is not over, by the order of the calls; the calls before where it is.
        self._open: list[dict[int, _Event]] = [{} for _ in world.records]
        self._depth = [0] * len(world.records)
        self._blocked: dict[int, tuple[_Event, RankStep, HostWait | None]] = {}
        # Inboxes that a rank receives from any other in: messages are counted there.
        self._from_any = self._inboxes_of_any()
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
        """Is a call of a rank over? If not, the rank waits for it."""
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
        own = group.own
        if call.kind == "send":
            inbox: _Event = (group.number, call.peer, call.tag)
            sent: _Event = (*inbox, own, call.place, "sent")
            received: _Event = (*inbox, own, call.place, "received")
            if inbox in self._from_any:
                self._arrived[inbox] += 1
                sent = received = (*inbox, self._arrived[inbox])
            self._happen(sent, self._depth[rank] + 1)
            return None if self._buffered or inbox in self._from_any else received
        inbox = (group.number, own, call.tag)
        if inbox in self._from_any:
            self._received[inbox] += 1
            return (*inbox, self._received[inbox])
        self._happen((*inbox, call.peer, call.place, "received"), self._depth[rank] + 1)
        return (*inbox, call.peer, call.place, "sent")

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
            # Where the host waits, the rank looks again at all that it waits for.
            self._ready.append(rank)

    def finding(self) -> Finding | None:
        """The ranks that cannot go on: those that others have left alone, or a cycle. None if all have ended."""
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
        ended = {rank: EndWords.PASSED for rank in range(len(self._at)) if rank not in self._blocked}
        found = describe_deadlock(stuck, ended)
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
                    {key: [call for call in issued if call.order < _order(rest[0])] for key, issued in by_key.items()}
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


def judge(world: WorldRecords, progress: Progress, is_cut: bool = False) -> Finding | None:
    """The first fault of a world: groups, what must agree, ranks that cannot go on, calls that lack a partner.

    `is_cut`: some ranks have ended early, since they would have judged values that nobody has communicated. Then only
    what ranks have done counts: calls that disagree, and cycles.
    """
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


# --------------------------------------------------------------------------------------------------------------------
# Traffic: the bytes that each rank sends to each other. What a backend sends depends on its algorithm: a call counts
# as the least that each rank must send, spread evenly over the others. So an all_reduce counts as a reduce_scatter and
# an all_gather.

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
        root = None if call.is_p2p else call.agreement[-1]
        if call.is_p2p and call.peer is not None:
            self.to[call.peer] += amount
        elif call.kind in _TO_ROOT and root is not None:
            self.to[root] += amount
        elif call.exchange is not None:
            elements, _ = call.exchange
            for place, count_of in enumerate(elements):
                self.to[place] += amount * count_of // max(1, sum(elements))
        elif call.kind not in _FROM_ROOT or root == own:
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
