"""The calls of the ranks of a world.

Ranks that have done the same are of one class, and share their calls.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch_testing_ext._collectives.records.issued_calls import Call, GroupKey, GroupRecord, RankRecord, generations
from torch_testing_ext._collectives.records.rank_facts import RankFacts
from torch_testing_ext._collectives.sanitizer.sanitizer_log import HostWait, LogReader
from torch_testing_ext._process.code_sites import Site
from torch_testing_ext._process.words import count, grouped, list_of, verb_for

# What ranks note of values that nobody has communicated: they were read, or compared by an assertion, or that has
# ended the rank.
READ, COMPARED, CUT = "read", "compared", "cut"


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
    # The lines that made its groups.
    sites: list[Site | None]
    # Collectives, and messages, by the place of their group.
    calls: dict[int, Sequence[Call]]
    messages: dict[int, Sequence[Call]]
    # What each of them has found by itself.
    notes: Sequence[Mapping[str, Any]]

    def __str__(self) -> str:
        calls = count(sum(step.call is not None for step in self.steps), "call")
        return f"{list_of(self.ranks)}{verb_for(self.ranks, '', ' alike')}: {calls}"


class _OfRank(NamedTuple):
    """All that one rank has done. `times`: those of its records, if they are wanted."""

    record: RankRecord
    keys: list[GroupKey]
    alike: RankClass
    memory: int
    times: Sequence[float]


@dataclass
class WorldRecords:
    """All that the ranks of a world have done, by rank. `keeps_times`: of each call, when each rank has issued it."""

    keeps_times: bool = False
    classes: list[RankClass] = field(default_factory=list)
    records: list[RankRecord] = field(default_factory=list)
    # The groups that each rank has made, and its class.
    keys: list[list[GroupKey]] = field(default_factory=list)
    class_of: list[RankClass] = field(default_factory=list)
    # The most bytes of tensors of each rank.
    memory: list[int] = field(default_factory=list)
    _added: dict[int, _OfRank] = field(default_factory=dict)
    _known: dict[bytes, RankClass] = field(default_factory=dict)
    _members: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)

    def add(self, rank: int, log: LogReader) -> None:
        """Add the log of a rank, in any order."""
        digest, groups = log.digest()
        alike = self._known.get(digest)
        if alike is None:
            alike = self._known[digest] = self._new_class(rank, log)
        record, keys = self._record(rank, groups, alike)
        times = log.times() if self.keeps_times else ()
        self._added[rank] = _OfRank(record, keys, alike, log.memory(), times)

    def complete(self) -> None:
        """Put all that has been added in the order of the ranks."""
        for rank, added in sorted(self._added.items()):
            if not added.alike.ranks:
                self.classes.append(added.alike)
            added.alike.ranks.append(rank)
            self.class_of.append(added.alike)
            self.records.append(added.record)
            self.keys.append(added.keys)
            self.memory.append(added.memory)

    def timed(self, rank: int) -> RankRecord | None:
        """The record of a rank, with the time of each call."""
        added = self._added.get(rank)
        if added is None or not added.times:
            return None
        calls = {
            key: [replace(call, at=added.times[call.order]) for call in issued]
            for key, issued in added.record.calls.items()
        }
        return replace(added.record, calls=calls)

    def _new_class(self, rank: int, log: LogReader) -> RankClass:
        content = log.read()
        assert content is not None
        if not content.is_whole:
            raise ValueError(
                f"rank {rank} has issued more calls, or made more groups of many ranks, than a log has room for: check "
                "a shorter part of it, or fewer ranks"
            )
        record = content.record(rank)
        slots = {key: slot for slot, key in enumerate(_keys(content.groups))}
        calls = {slots[key]: issued for key, issued in record.calls.items()}
        messages = {slots[key]: issued for key, issued in record.messages.items()}
        steps = [RankStep(call, slot) for by_slot in (calls, messages) for slot, of in by_slot.items() for call in of]
        steps += [RankStep(None, wait=wait) for wait in content.waits]
        by_order = dict(sorted((order_of(step), step) for step in steps))
        return RankClass([], list(by_order.values()), by_order, content.sites, calls, messages, content.notes)

    def _record(self, rank: int, groups: Sequence[GroupRecord], alike: RankClass) -> tuple[RankRecord, list[GroupKey]]:
        shared = [replace(group, members=self._members.setdefault(group.members, group.members)) for group in groups]
        keys = _keys(shared)
        calls = {keys[slot]: issued for slot, issued in alike.calls.items()}
        messages = {keys[slot]: issued for slot, issued in alike.messages.items()}
        record = RankRecord(rank, dict(zip(keys, shared, strict=True)), calls, True, None, messages=messages)
        return record, keys

    # -- facts

    def noted(self, kind: str) -> list[str]:
        """The lines at which ranks have noted something of a kind."""
        return list(
            dict.fromkeys(
                str(note["site"] or "") for alike in self.classes for note in alike.notes if note["kind"] == kind
            )
        )

    def reads(self) -> list[str]:
        """Sentences on the values that ranks have read, although a whole world does not know them."""
        read = grouped(
            ((note["text"], note["site"]), alike.ranks)
            for alike in self.classes
            for note in alike.notes
            if note["kind"] == READ
        )
        does = "reads a value that other ranks have a part in, and that a whole world does not know"
        return [
            f"{list_of(sorted(itertools.chain(*ranks)))}: {method} {does}   {site}"
            for (method, site), ranks in read.items()
        ]

    def facts(self) -> Iterator[RankFacts]:
        """The facts of each rank."""
        return map(RankFacts, self.records)


def order_of(step: RankStep) -> int:
    place = step.call or step.wait
    assert place is not None
    return place.order


def _keys(groups: Sequence[GroupRecord]) -> list[GroupKey]:
    used = generations(groups)
    return [GroupKey(group.name, number, "c10d", group.world) for group, number in zip(groups, used, strict=True)]
