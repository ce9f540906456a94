"""The record that a rank leaves at the end of a test.

It has the recorders' own pickles, which cost the rank least, and its groups.

The parent reads them. Ranks that agree are compared as they are; only of ranks that do not, records are made.
"""

from __future__ import annotations

import heapq
import math
import pickle
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pickle import dumps as dumps_pickle
from typing import Any, NamedTuple

from torch_testing_ext._collectives.blocked.rank_state import RankState
from torch_testing_ext._process import messages
from torch_testing_ext._process.code_sites import Site
from torch_testing_ext._process.words import grouped
from torch_testing_ext._tests.source_files import is_head_of_function
from torch_testing_ext._torch.signs.recorded_entries import RecordedEntry
from torch_testing_ext._torch.torch_frames import is_of_program

from .issued_calls import (
    Call,
    CallInGroup,
    GroupKey,
    GroupRecord,
    MemberList,
    RankRecord,
    agreement_of,
    generations,
    make_record,
    raised_for,
)


def pack_record(
    groups: Sequence[tuple[Any, ...]],
    dumps: Sequence[tuple[int, bytes]],
    errors: Sequence[int],
    folder: str,
    at: float,
    state: RankState | None = None,
    sequences: Mapping[str, tuple[int, int, int]] | None = None,
    creating: tuple[Any, ...] | None = None,
    lists: Sequence[tuple[Any, ...]] = (),
    living: Sequence[int] | None = None,
    dead_threads: Sequence[tuple[str, str]] = (),
) -> bytes:
    """Pack the record of a rank.

    `groups`: those that it has made, as the fields of a GroupRecord and the time of their making; `creating`: the one
    that it is making. `dumps`: of its recorders, each after the number of the first entry that counts. `errors`: when
    functions of torch.distributed have raised. `folder`: of torch. `at`: the moment. `state`: of its threads.
    `sequences`: the sequence numbers of its groups, None if unknown: then there may be messages that nobody has noted.
    `lists`: the fields of the member lists that it has given. `living`: the numbers of the groups that it has, while it
    runs. `dead_threads`: see `RankRecord`.
    """
    packed = messages.encode(state)
    return dumps_pickle((groups, dumps, errors, folder, at, packed, sequences, creating, lists, living, dead_threads))


# So many threads are expected to issue calls with roots in one group at the same time.
_MOST_AT_ONCE = 8


class _Entry(NamedTuple):
    """An entry of torch's flight recorder, with the number of its group among those of the rank, if that is sure."""

    call: RecordedEntry
    number: int | None


class RawRecord:
    """The record that a rank has left, read. `is_whole`: no recorder has dropped entries that count."""

    def __init__(self, data: bytes):
        fields = pickle.loads(data)
        listed, dumps, errors, self._folder, self.at, state, sequences, creating, lists, living, dead = fields
        self._dead_threads: Sequence[tuple[str, str]] = dead
        self._errors: Sequence[int] = errors
        self._has_all_messages = True
        self._living: Sequence[int] | None = living
        self._lists = tuple(MemberList.made(*fields) for fields in lists)
        self.groups = [GroupRecord.made(fields) for fields in listed]
        self._creating = GroupRecord.made(creating) if creating is not None else None
        self.is_whole = True
        self._roots: dict[tuple[int, str], list[tuple[int, float, int]]] = {}
        # The times at which groups of each name were made, and their numbers.
        self._made: dict[str, tuple[list[int], list[int]]] = {}
        for number, (name, *_, made) in enumerate(listed):
            times, numbers = self._made.setdefault(name, ([], []))
            if times and times[-1] >= made:
                # The clock was set back.
                self.is_whole = False
            times.append(made)
            numbers.append(number)
        recorded = [self._entries_of(dump, first) for first, dump in dumps]
        self._entries = _merged([entries for entries in recorded if entries])
        self._state: RankState | None = None
        may_have_sent = sequences is None or self._has_gaps(sequences)
        self._has_all_messages &= not may_have_sent
        if state:
            seen = messages.decode(RankState, state)
            awaited = None if seen.message is None else self._order_of_message(seen.message)
            self._state = replace(seen, p2p=may_have_sent, message=awaited)

    def _entries_of(self, dump: bytes, first: int) -> list[_Entry]:
        """The entries of a recorder that count: from this number on."""
        entries: list[RecordedEntry] = []
        if dump:
            content = pickle.loads(dump)
            entries = [RecordedEntry(fields) for fields in content.get("entries", [])]
            self._has_all_messages &= content.get("messages", True)
            for number, kind, root, began, issued in content.get("roots", ()):
                self._roots.setdefault((number, kind), []).append((began, issued or math.inf, root))
        if entries and entries[0].number > first:
            self.is_whole = False
        return self._with_groups([entry for entry in entries if entry.number >= first])

    def _has_gaps(self, sequences: Mapping[str, tuple[int, int, int]]) -> bool:
        """Whether the rank may have sent or received what is not noted. Each message uses up a number of its group.

        Those of the collectives do not count messages.
        """
        in_groups = grouped((entry.call.group, entry.call) for entry in self._entries)
        for name, (number, before, used_up) in sequences.items():
            collectives, messages = before, used_up
            for call in in_groups.get(name, []):
                messages += call.messages - call.tags
                if call.tags:
                    collectives += call.tags
                elif not call.is_p2p:
                    collectives = max(collectives, call.sequence_number)
            if number != collectives + messages:
                return True
        return False

    def _root_of(self, call: RecordedEntry, group: int | None) -> int | None:
        """The root of a call; None if that is not noted, or another thread has issued such a call at the same time."""
        noted = self._roots.get((group, call.kind), []) if group is not None else []
        at = bisect(noted, call.created, key=lambda each: each[0])
        roots = [root for _, issued, root in noted[max(0, at - _MOST_AT_ONCE) : at] if call.created <= issued]
        return roots[0] if len(roots) == 1 else None

    def _order_of_message(self, number: int) -> int | None:
        """The order of the message that has this number among the messages."""
        return next((entry.call.number for entry in self._entries if entry.call.message == number), None)

    def _with_groups(self, calls: Sequence[RecordedEntry]) -> list[_Entry]:
        """The entries with the number of their group: the latest one of that name, unless another one may have it."""
        latest = [self._latest(call.group, call.created) for call in calls]
        pairs = {
            ((self._origin(number), call.backend), call.group_id)
            for call, number in zip(calls, latest, strict=True)
            if number is not None
        }
        ids_of = grouped(pairs)
        numbers_of = grouped((group_id, number) for number, group_id in pairs)
        sure = {of for of, ids in ids_of.items() if len(ids) == 1 and len(numbers_of[ids[0]]) == 1}
        return [
            _Entry(call, number if number is not None and (self._origin(number), call.backend) in sure else None)
            for call, number in zip(calls, latest, strict=True)
        ]

    def _origin(self, number: int) -> int:
        """The number of the group that was reconfigured to this one; its own if none was."""
        group = self.groups[number]
        if not group.is_reconfigured:
            return number
        earlier = (n for n in range(number) if self.groups[n].name == group.name)
        return max((n for n in earlier if not self.groups[n].is_reconfigured), default=number)

    def _latest(self, name: str, created: int) -> int | None:
        times, numbers = self._made.get(name, ([], []))
        at = bisect(times, created)
        return numbers[at - 1] if at else None

    @property
    def given_members(self) -> tuple[tuple[int, ...], ...]:
        """The members that it has given for groups which all ranks make, in order."""
        return tuple(each.members for each in self._lists)

    def calls(self) -> dict[GroupKey, list[tuple[Any, ...]]]:
        """The calls in each group, with the properties that can be compared cheaply."""
        keys = keys_of(self.groups)
        calls: dict[GroupKey, list[tuple[Any, ...]]] = {}
        for call, number in self._entries:
            if number is not None and not call.is_p2p:
                shared = call.what_members_share, self._root_of(call, number)
                calls.setdefault(keys[number], []).append(shared)
        return calls

    def messages(self) -> Iterator[tuple[GroupKey, str, tuple[int | None, ...], tuple[Any, ...]]]:
        """The sends and receives: group, kind, source, target and tag as numbers, and what it is."""
        keys = keys_of(self.groups)
        for call, number in self._entries:
            if number is not None and call.message is not None:
                here = self.groups[number].index
                source, target = (here, call.peer) if call.kind == "send" else (call.peer, here)
                yield keys[number], call.kind, (source, target, call.tag), _agreement(call, "message")

    def record(self, rank: int) -> RankRecord:
        """All that the rank has issued, if this is its number."""
        has_raised = bool(self._errors)
        record = make_record(
            rank, self.groups, self._issued(), self.is_whole, self._state, self.at, has_raised, self._creating
        )
        living = None
        if self._living is not None:
            keys = keys_of(self.groups)
            # The rank ran on: it may have made groups after those that it has listed.
            listed = [keys[n] for n in self._living if n < len(keys)]
            living = frozenset((key.name, key.generation, key.world) for key in listed)
        return replace(
            record,
            has_all_messages=self._has_all_messages,
            lists=self._lists,
            living=living,
            dead_threads=tuple(self._dead_threads),
        )

    def _issued(self) -> Iterator[CallInGroup]:
        raised, latest = self._raised(), len(self._entries) - 1
        for at, (call, number) in enumerate(self._entries):
            site = self._site(call) or (self._site_of_wait() if at == latest else None)
            yield read_entry(call, number, site, at in raised, self._root_of(call, number))

    def _site_of_wait(self) -> Site | None:
        """The line at which the main thread waits for another one, which has no line of the program."""
        if self._state is None or not self._state.waits_in_own_process:
            return None
        return next((Site(*frame) for frame in self._state.frames if is_of_program(frame[0])), None)

    def _raised(self) -> set[int]:
        """The entries after which something has raised."""
        if not self._errors:
            return set()
        calls = grouped((call.group, (call.created, at)) for at, (call, _) in enumerate(self._entries))
        return {at for in_group in calls.values() for at in raised_for(in_group, self._errors)}

    def _site(self, call: RecordedEntry) -> Site | None:
        places = (place for place in call.places(self._folder) if not is_head_of_function(*place[:2]))
        return next((Site(*place) for place in places), None)


def read_entry(
    entry: RecordedEntry, group: int | None, site: Site | None, raised: bool = False, root: int | None = None
) -> CallInGroup:
    """The call of an entry of torch's flight recorder. `group`: the number of its group among those of the rank."""
    call = Call(
        kind=entry.kind,
        order=entry.number,
        shapes=entry.shapes,
        inputs=entry.inputs,
        agreement=_agreement(entry, entry.kind),
        peer=entry.peer,
        tag=entry.tag,
        is_over=entry.is_over,
        timeout=entry.timeout,
        site=site,
        raised=raised,
        root=root,
        is_p2p=entry.is_p2p,
        tells_end=entry.tells_end,
        at=entry.created / 1e9,
    )
    return CallInGroup(call, group, entry.backend, knows_peer=entry.message is not None)


def _agreement(entry: RecordedEntry, kind: str) -> tuple[Any, ...]:
    """The properties that all members must agree on; the recorder knows no reduce operation or splits."""
    side = entry.compared_side
    if side is not None:
        return kind, *entry.sizes_and_types(side)
    inputs, types = entry.sizes_and_types("input")
    return agreement_of(kind, inputs, types, entry.sizes_and_types("output")[1])


def _merged(recorded: list[list[_Entry]]) -> list[_Entry]:
    """The entries of all recorders by their time, numbered again: each recorder counts its own."""
    if not recorded:
        return []
    if len(recorded) == 1:
        return recorded[0]
    merged = heapq.merge(*recorded, key=lambda entry: entry.call.created)
    return [entry._replace(call=entry.call.numbered(at)) for at, entry in enumerate(merged)]


def keys_of(groups: Sequence[GroupRecord]) -> list[GroupKey]:
    """Groups by name, world, and how often the name had been used in that world; the backend is left open."""
    used = generations(groups)
    return [GroupKey(group.name, number, "", group.world) for group, number in zip(groups, used, strict=True)]


def unpack_record(data: bytes) -> RawRecord | None:
    """Read the record that a rank has left; None if there is none, or it is incomplete."""
    try:
        return RawRecord(data) if data else None
    except (ValueError, KeyError, TypeError, IndexError, EOFError, AttributeError, pickle.UnpicklingError):
        return None


def read_raw(rank: int, data: bytes) -> RankRecord | None:
    """The record of a rank from what it has left."""
    raw = unpack_record(data)
    return raw.record(rank) if raw is not None else None


def do_members_agree(records: Sequence[RawRecord | None]) -> bool:
    """Whether all members of every group have issued the same. If not, look closer.

    The inputs of a scatter are its root's.
    """
    seen: dict[GroupKey, list[tuple[Any, ...]]] = {}
    if len({record.given_members for record in records if record is not None}) > 1:
        return False
    for record in records:
        if record is None:
            continue
        issued = record.calls()
        for key in keys_of(record.groups):
            calls = issued.get(key, [])
            if seen.setdefault(key, calls) != calls:
                return False
        if not record.is_whole:
            return False
    return _do_messages_fit([record for record in records if record is not None])


def _do_messages_fit(records: Sequence[RawRecord]) -> bool:
    """Whether each message was sent and received alike. If a rank receives from any, it is not known who has sent."""
    sent, received = (
        grouped(
            ((key, route), what) for record in records for key, each, route, what in record.messages() if each == kind
        )
        for kind in ("send", "recv")
    )
    return sent == received
