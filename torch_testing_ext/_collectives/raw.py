"""The record that a rank leaves at the end of a test: the recorders' own pickles, which cost it least, and its groups.

The parent reads them. Ranks that agree are compared as they are; only of ranks that do not, records are made.
"""

from __future__ import annotations

import heapq
import pickle
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch_testing_ext._process import messages
from torch_testing_ext._process.words import grouped

from .blocked import RankState
from .records import GroupKey, GroupRecord, RankRecord, generations, make_record, raised_for

# Of the deprecated functions of torch.distributed.
_DECORATORS = "/typing_extensions.py"

# The fields that are kept of an entry, with its group, the line of its call and whether it raised.
_KEPT = (
    *("record_id", "process_group", "collective_seq_id", "profiling_name", "retired", "state", "timeout_ms", "is_p2p"),
    *("input_sizes", "input_dtypes", "output_sizes", "output_dtypes", "time_created_ns"),
)


def pack(
    groups: Sequence[tuple[Any, ...]],
    dumps: Sequence[tuple[int, bytes]],
    errors: Sequence[int],
    folder: str,
    at: float,
    state: RankState | None = None,
    sequences: Mapping[str, tuple[int, int]] | None = None,
    creating: tuple[Any, ...] | None = None,
) -> bytes:
    """Pack the record of a rank: its groups, as the fields of a GroupRecord and the time of their making; the dumps of
    its recorders; when a function of torch.distributed has raised; torch's folder; the moment; the state of its
    threads; the sequence numbers of its groups, None if unknown; and the group that it is making, as the others."""
    return pickle.dumps((groups, dumps, errors, folder, at, messages.encode(state), sequences, creating))


class RawRecord:
    """The record that a rank has left, read. `is_whole`: no recorder has dropped entries that count."""

    def __init__(self, data: bytes):
        listed, dumps, self._errors, self._folder, self.at, state, sequences, creating = pickle.loads(data)
        self.groups = [GroupRecord(*fields[:-1]) for fields in listed]
        self._creating = GroupRecord(*creating[:-1]) if creating is not None else None
        self.is_whole = True
        self._made: dict[str, tuple[list[int], list[int]]] = {}  # by name: when, and the numbers
        for number, (name, *_, made) in enumerate(listed):
            times, numbers = self._made.setdefault(name, ([], []))
            self.is_whole = self.is_whole and (not times or times[-1] < made)  # else the clock was set back
            times.append(made)
            numbers.append(number)
        recorded: list[list[tuple[Mapping[str, Any], int | None]]] = []
        for first, dump in dumps:
            found: list[Mapping[str, Any]] = pickle.loads(dump).get("entries", []) if dump else []
            self.is_whole = self.is_whole and (not found or int(found[0]["record_id"]) <= first)
            counting = [entry for entry in found if entry["record_id"] >= first]
            if counting:
                recorded.append(list(zip(counting, self._groups_of(counting), strict=True)))
        merged = _merged(recorded)
        self._entries = [entry for entry, _ in merged]
        self._numbers = [number for _, number in merged]
        p2p = sequences is None or self._has_gaps(sequences)
        self._state = replace(messages.decode(RankState, state), p2p=p2p) if state else None

    def _has_gaps(self, sequences: Mapping[str, tuple[int, int]]) -> bool:
        """May the rank have sent or received after its last collective? That uses up a number, and is not recorded."""
        recorded = grouped((str(entry["process_group"][0]), entry["collective_seq_id"]) for entry in self._entries)
        return any(number != max(recorded.get(name, [before])) for name, (number, before) in sequences.items())

    def _groups_of(self, entries: Sequence[Mapping[str, Any]]) -> list[int | None]:
        """The number of each entry's group: the latest one of that name. None if another one may have that name."""
        found = [self._latest(str(entry["process_group"][0]), entry["time_created_ns"]) for entry in entries]
        known = {(number, entry["pg_id"]) for entry, number in zip(entries, found, strict=True) if number is not None}
        ids, groups = grouped(known), grouped((pg_id, number) for number, pg_id in known)
        sure = {number for number, each in ids.items() if len(each) == len(groups[each[0]]) == 1}
        return [number if number in sure else None for number in found]

    def _latest(self, name: str, created: int) -> int | None:
        times, numbers = self._made.get(name, ([], []))
        at = bisect(times, created)
        return numbers[at - 1] if at else None

    def calls(self) -> dict[GroupKey, list[tuple[Any, ...]]]:
        """The calls in each group, with the properties that can be compared cheaply."""
        keys = keys_of(self.groups)
        return grouped(
            (keys[number], (entry["profiling_name"], entry["input_sizes"], entry["input_dtypes"]))
            for entry, number in zip(self._entries, self._numbers, strict=True)
            if number is not None and not entry["is_p2p"]
        )

    def record(self, rank: int) -> RankRecord:
        """All that the rank has issued, if this is its number."""
        entries, has_raised = list(self._compact()), bool(self._errors)
        return make_record(rank, self.groups, entries, self.is_whole, self._state, self.at, has_raised, self._creating)

    def _compact(self) -> Iterator[dict[str, Any]]:
        raised = self._raised()
        for at, (entry, number) in enumerate(zip(self._entries, self._numbers, strict=True)):
            kept = {name: entry[name] for name in _KEPT if name in entry}
            kept["group"] = number
            kept["site"] = self._site(entry)
            kept["raised"] = at in raised
            yield kept

    def _raised(self) -> set[int]:
        """The entries after which something has raised."""
        if not self._errors:
            return set()
        named = ((str(entry["process_group"][0]), entry["time_created_ns"]) for entry in self._entries)
        times = grouped((name, (created, at)) for at, (name, created) in enumerate(named))
        return {at for one in times.values() for at in raised_for(one, self._errors)}

    def _site(self, entry: Mapping[str, Any]) -> tuple[str, int, str] | None:
        for frame in entry.get("frames", ()):
            name = frame["filename"]
            if not name.startswith((self._folder, "<")) and not name.endswith(_DECORATORS):
                return frame["filename"], frame["line"], frame["name"]
        return None


def _merged(recorded: list[list[tuple[Mapping[str, Any], int | None]]]) -> list[tuple[Mapping[str, Any], int | None]]:
    """The entries of all recorders by their time, numbered again: each recorder counts its own."""
    if len(recorded) < 2:
        return recorded[0] if recorded else []
    merged = heapq.merge(*recorded, key=lambda one: int(one[0]["time_created_ns"]))
    return [({**entry, "record_id": at}, number) for at, (entry, number) in enumerate(merged)]


def keys_of(groups: Sequence[GroupRecord]) -> list[GroupKey]:
    """Groups by name, world, and how often the name had been used in that world; the backend is left open."""
    used = generations(groups)
    return [GroupKey(group.name, number, "", group.world) for group, number in zip(groups, used, strict=True)]


def unpack(data: bytes) -> RawRecord | None:
    """Read the record that a rank has left; None if there is none, or it is incomplete."""
    try:
        return RawRecord(data) if data else None
    except (ValueError, KeyError, TypeError, IndexError, EOFError, AttributeError, pickle.UnpicklingError):
        return None


def read_raw(rank: int, data: bytes) -> RankRecord | None:
    """The record of a rank from what it has left."""
    raw = unpack(data)
    return raw.record(rank) if raw is not None else None


def agree(records: Sequence[RawRecord | None]) -> bool:
    """Have all members of every group issued the same? If not, look closer: the inputs of a scatter are its root's."""
    seen: dict[GroupKey, list[tuple[Any, ...]]] = {}
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
    return True
