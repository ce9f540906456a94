"""The record that a rank leaves at the end of a test: the recorders' own pickles, which cost it least, and its groups.

The parent reads them. Ranks that agree are compared as they are; only of ranks that do not, records are made.
"""

from __future__ import annotations

import heapq
import math
import pickle
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch_testing_ext._process import messages

from .blocked import RankState
from .records import (
    Call,
    CallInGroup,
    GroupKey,
    GroupRecord,
    RankRecord,
    Site,
    agreement_of,
    generations,
    grouped,
    make_record,
    raised_for,
)

# Of the deprecated functions of torch.distributed.
_DECORATORS = "/typing_extensions.py"

# The names that torch's C++ has for the types whose names differ in Python.
_DTYPES = {
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "Half": "float16",
    "Float": "float32",
    "Double": "float64",
    "ComplexHalf": "complex32",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}


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
        has_raised = bool(self._errors)
        return make_record(
            rank, self.groups, self._issued(), self.is_whole, self._state, self.at, has_raised, self._creating
        )

    def _issued(self) -> Iterator[CallInGroup]:
        raised = self._raised()
        for at, (entry, number) in enumerate(zip(self._entries, self._numbers, strict=True)):
            yield read_entry(entry, number, self._site(entry), at in raised)

    def _raised(self) -> set[int]:
        """The entries after which something has raised."""
        if not self._errors:
            return set()
        named = ((str(entry["process_group"][0]), entry["time_created_ns"]) for entry in self._entries)
        times = grouped((name, (created, at)) for at, (name, created) in enumerate(named))
        return {at for one in times.values() for at in raised_for(one, self._errors)}

    def _site(self, entry: Mapping[str, Any]) -> Site | None:
        for frame in entry.get("frames", ()):
            name = frame["filename"]
            if not name.startswith((self._folder, "<")) and not name.endswith(_DECORATORS):
                return Site(name, frame["line"], frame["name"])
        return None


def read_entry(entry: Mapping[str, Any], group: int | None, site: Site | None, raised: bool = False) -> CallInGroup:
    """The call of an entry of torch's flight recorder. `group`: the number of its group among those of the rank."""
    backend, _, kind = str(entry.get("profiling_name", "?")).rpartition(":")
    shapes = tuple(str(list(size)) for size in entry.get("input_sizes") or ())
    dtypes = [_DTYPES.get(name, name.lower()) for name in entry.get("input_dtypes") or ()]
    inputs = tuple(f"{shape} {dtypes[at]}" if at < len(dtypes) else shape for at, shape in enumerate(shapes))
    timeout_ms = entry.get("timeout_ms")
    is_retired, state = bool(entry.get("retired")), entry.get("state")
    # Another backend than gloo may not tell when a call is over: it is retired as soon as it is issued. gloo retires a
    # call at its end, and leaves it "scheduled" all the same.
    is_only_issued = backend != "gloo" and is_retired and state == "scheduled"
    # It is retired before it is over, as a call of NCCL is at its time-out.
    was_given_up = backend != "gloo" and state == "started"
    call = Call(
        kind=kind,
        order=int(entry.get("record_id", 0)),
        shapes=shapes,
        inputs=inputs,
        agreement=_agreement(entry, backend, kind),
        is_over=is_retired and not is_only_issued and not was_given_up,
        timeout=timeout_ms / 1000 if timeout_ms else math.inf,
        site=site,
        raised=raised,
        is_p2p=bool(entry.get("is_p2p")),
        tells_end="retired" in entry and not is_only_issued,
        at=entry.get("time_created_ns", 0) / 1e9,
    )
    return CallInGroup(call, group, backend, knows_peer=False)


def _agreement(entry: Mapping[str, Any], backend: str, kind: str) -> tuple[Any, ...]:
    """What all members must agree on, as far as the recorder knows it: neither root nor reduce operation nor splits."""
    inputs = tuple(math.prod(size) for size in entry.get("input_sizes") or ())
    outputs = tuple(math.prod(size) for size in entry.get("output_sizes") or ())
    input_types = tuple(entry.get("input_dtypes") or ())
    output_types = tuple(entry.get("output_dtypes") or ())
    if backend == "gloo" and kind == "scatter":
        return kind, outputs, output_types
    if backend == "gloo" and kind in ("all_gather", "gather"):
        return kind, inputs, input_types
    return agreement_of(kind, inputs, input_types, output_types)


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
