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
from typing import Any, NamedTuple

from torch_testing_ext._process import messages
from torch_testing_ext._process.words import grouped

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
    """Pack the record of a rank.

    `groups`: those that it has made, as the fields of a GroupRecord and the time of their making; `creating`: the one
    that it is making. `dumps`: of its recorders, each after the number of the first entry that counts. `errors`: the
    times at which functions of torch.distributed have raised. `folder`: of torch. `at`: the moment. `state`: of its
    threads. `sequences`: the sequence numbers of its groups, None if unknown.
    """
    return pickle.dumps((groups, dumps, errors, folder, at, messages.encode(state), sequences, creating))


class _Entry(NamedTuple):
    """An entry of torch's flight recorder, with the number of its group among those of the rank, if that is sure."""

    fields: Mapping[str, Any]
    number: int | None

    @property
    def group(self) -> str:
        """The name of its group."""
        return str(self.fields["process_group"][0])

    @property
    def created(self) -> int:
        return int(self.fields["time_created_ns"])


class RawRecord:
    """The record that a rank has left, read. `is_whole`: no recorder has dropped entries that count."""

    def __init__(self, data: bytes):
        listed, dumps, self._errors, self._folder, self.at, state, sequences, creating = pickle.loads(data)
        self.groups = [GroupRecord(*fields[:-1]) for fields in listed]
        self._creating = GroupRecord(*creating[:-1]) if creating is not None else None
        self.is_whole = True
        # By name: when groups of this name were made, and their numbers.
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
        if state:
            may_have_sent = sequences is None or self._has_gaps(sequences)
            self._state = replace(messages.decode(RankState, state), p2p=may_have_sent)

    def _entries_of(self, dump: bytes, first: int) -> list[_Entry]:
        """The entries of a recorder that count: from this number on."""
        entries: list[Mapping[str, Any]] = pickle.loads(dump).get("entries", []) if dump else []
        if entries and int(entries[0]["record_id"]) > first:
            self.is_whole = False
        counting = [_Entry(fields, None) for fields in entries if fields["record_id"] >= first]
        return self._with_groups(counting)

    def _has_gaps(self, sequences: Mapping[str, tuple[int, int]]) -> bool:
        """May the rank have sent or received after its last collective? That uses up a number, and is not recorded."""
        recorded = grouped((entry.group, entry.fields["collective_seq_id"]) for entry in self._entries)
        latest = {name: max(recorded.get(name, [before])) for name, (_, before) in sequences.items()}
        return any(number != latest[name] for name, (number, _) in sequences.items())

    def _with_groups(self, entries: Sequence[_Entry]) -> list[_Entry]:
        """The entries with the number of their group: the latest one of that name, unless another one may have it."""
        latest = [self._latest(entry.group, entry.created) for entry in entries]
        pairs = {
            (number, entry.fields["pg_id"]) for entry, number in zip(entries, latest, strict=True) if number is not None
        }
        ids_of = grouped(pairs)
        numbers_of = grouped((pg_id, number) for number, pg_id in pairs)
        sure = set()
        for number, pg_ids in ids_of.items():
            if len(pg_ids) == 1 and len(numbers_of[pg_ids[0]]) == 1:
                sure.add(number)
        return [
            entry._replace(number=number) if number in sure else entry
            for entry, number in zip(entries, latest, strict=True)
        ]

    def _latest(self, name: str, created: int) -> int | None:
        times, numbers = self._made.get(name, ([], []))
        at = bisect(times, created)
        return numbers[at - 1] if at else None

    def calls(self) -> dict[GroupKey, list[tuple[Any, ...]]]:
        """The calls in each group, with the properties that can be compared cheaply."""
        keys = keys_of(self.groups)
        calls: dict[GroupKey, list[tuple[Any, ...]]] = {}
        for fields, number in self._entries:
            if number is not None and not fields["is_p2p"]:
                call = fields["profiling_name"], fields["input_sizes"], fields["input_dtypes"]
                calls.setdefault(keys[number], []).append(call)
        return calls

    def record(self, rank: int) -> RankRecord:
        """All that the rank has issued, if this is its number."""
        has_raised = bool(self._errors)
        return make_record(
            rank, self.groups, self._issued(), self.is_whole, self._state, self.at, has_raised, self._creating
        )

    def _issued(self) -> Iterator[CallInGroup]:
        raised = self._raised()
        for at, (fields, number) in enumerate(self._entries):
            yield read_entry(fields, number, self._site(fields), at in raised)

    def _raised(self) -> set[int]:
        """The entries after which something has raised."""
        if not self._errors:
            return set()
        calls = grouped((entry.group, (entry.created, at)) for at, entry in enumerate(self._entries))
        return {at for in_group in calls.values() for at in raised_for(in_group, self._errors)}

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
    """The properties that all members must agree on; the recorder knows no root, reduce operation or splits."""
    inputs = tuple(math.prod(size) for size in entry.get("input_sizes") or ())
    outputs = tuple(math.prod(size) for size in entry.get("output_sizes") or ())
    input_types = tuple(entry.get("input_dtypes") or ())
    output_types = tuple(entry.get("output_dtypes") or ())
    if backend == "gloo" and kind == "scatter":
        return kind, outputs, output_types
    if backend == "gloo" and kind in ("all_gather", "gather"):
        return kind, inputs, input_types
    return agreement_of(kind, inputs, input_types, output_types)


def _merged(recorded: list[list[_Entry]]) -> list[_Entry]:
    """The entries of all recorders by their time, numbered again: each recorder counts its own."""
    if not recorded:
        return []
    if len(recorded) == 1:
        return recorded[0]
    merged = heapq.merge(*recorded, key=lambda entry: entry.created)
    return [entry._replace(fields={**entry.fields, "record_id": at}) for at, entry in enumerate(merged)]


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
