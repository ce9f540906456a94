"""The record that a rank leaves at the end of a test: the recorders' own pickles, which cost it least, and its groups.

The parent reads them. Ranks that agree are compared as they are; only of ranks that do not, a text is made.
"""

from __future__ import annotations

import heapq
import pickle
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .blocked import RankState
from .records import GroupKey, GroupRecord, RankRecord, make_record, raised_for, text_of

# Of the deprecated functions of torch.distributed.
_DECORATORS = "/typing_extensions.py"

# The fields that are kept of an entry, with its group, the line of its call and whether it raised.
_KEPT = (
    *("record_id", "process_group", "collective_seq_id", "profiling_name", "retired", "state", "timeout_ms", "is_p2p"),
    *("input_sizes", "input_dtypes", "output_sizes", "output_dtypes"),
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
    return pickle.dumps((groups, dumps, errors, folder, at, state and state.to_json(), sequences, creating))


class RawRecord:
    """The record that a rank has left, read. `is_whole`: no recorder has dropped entries that count."""

    def __init__(self, data: bytes):
        listed, dumps, self._errors, self._folder, self.at, state, sequences, creating = pickle.loads(data)
        self.groups = [_group_of(fields) for fields in listed]
        self._creating = _group_of(creating) if creating is not None else None
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
        self._state = replace(RankState.from_json(state), p2p=p2p) if state else None

    def _has_gaps(self, sequences: Mapping[str, tuple[int, int]]) -> bool:
        """May the rank have sent or received after its last collective? That uses up a number, and is not recorded."""
        latest: dict[str, int] = {}
        for entry in self._entries:
            name = str(entry["process_group"][0])
            latest[name] = max(latest.get(name, 0), entry["collective_seq_id"])
        return any(number != latest.get(name, before) for name, (number, before) in sequences.items())

    def _groups_of(self, entries: Sequence[Mapping[str, Any]]) -> list[int | None]:
        """The number of each entry's group: the latest one of that name. None if another one may have that name."""
        found = [self._latest(str(entry["process_group"][0]), entry["time_created_ns"]) for entry in entries]
        ids: dict[int, set[int]] = {}
        groups: dict[int, set[int]] = {}
        for entry, number in zip(entries, found, strict=True):
            if number is not None:
                ids.setdefault(number, set()).add(entry["pg_id"])
                groups.setdefault(entry["pg_id"], set()).add(number)
        sure = {number for number, each in ids.items() if len(each) == 1 and len(groups[next(iter(each))]) == 1}
        return [number if number in sure else None for number in found]

    def _latest(self, name: str, created: int) -> int | None:
        times, numbers = self._made.get(name, ([], []))
        at = bisect(times, created)
        return numbers[at - 1] if at else None

    def calls(self) -> dict[GroupKey, list[tuple[Any, ...]]]:
        """The calls in each group, with the properties that can be compared cheaply."""
        keys = keys_of(self.groups)
        found: dict[GroupKey, list[tuple[Any, ...]]] = {}
        for entry, number in zip(self._entries, self._numbers, strict=True):
            if number is not None and not entry["is_p2p"]:
                what = entry["profiling_name"], entry["input_sizes"], entry["input_dtypes"]
                found.setdefault(keys[number], []).append(what)
        return found

    def text(self) -> str:
        """The text that `read_record` reads."""
        entries = list(self._compact())
        return text_of(self.groups, entries, self.is_whole, self._state, self.at, bool(self._errors), self._creating)

    def record(self, rank: int) -> RankRecord:
        """The same as `read_record` makes of the text."""
        entries = list(self._compact())
        has_raised = bool(self._errors)
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
        times: dict[str, list[tuple[int, int]]] = {}  # by the name of a group
        for at, entry in enumerate(self._entries):
            times.setdefault(str(entry["process_group"][0]), []).append((entry["time_created_ns"], at))
        return {at for one in times.values() for at in raised_for(one, self._errors)}

    def _site(self, entry: Mapping[str, Any]) -> tuple[str, int, str] | None:
        for frame in entry.get("frames", ()):
            name = frame["filename"]
            if not name.startswith((self._folder, "<")) and not name.endswith(_DECORATORS):
                return frame["filename"], frame["line"], frame["name"]
        return None


def _group_of(fields: tuple[Any, ...]) -> GroupRecord:
    name, description, members, index, world, _ = fields
    return GroupRecord(name, description, tuple(members), index, world)


def _merged(
    recorded: list[list[tuple[Mapping[str, Any], int | None]]],
) -> list[tuple[Mapping[str, Any], int | None]]:
    """The entries of all recorders by their time, numbered again: each recorder counts its own."""
    if len(recorded) < 2:
        return recorded[0] if recorded else []
    merged = heapq.merge(*recorded, key=lambda one: int(one[0]["time_created_ns"]))
    return [({**entry, "record_id": at}, number) for at, (entry, number) in enumerate(merged)]


def keys_of(groups: Sequence[GroupRecord]) -> list[GroupKey]:
    """Groups by name, world, and how often the name had been used in that world; the backend is left open."""
    times: dict[tuple[str, str], int] = {}
    keys = []
    for group in groups:
        same = group.name, group.world
        keys.append(GroupKey(group.name, times.get(same, 0), "", group.world))
        times[same] = times.get(same, 0) + 1
    return keys


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
