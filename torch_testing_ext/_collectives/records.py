"""The collectives that a rank has issued, made of what its recorders have kept, or of its log.

Both give `entries` like those of torch's flight recorder, each with the number of its group among those that the rank
has made, and the `site` of its call.
"""

from __future__ import annotations

import itertools
import math
import os
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch_testing_ext._process.words import grouped

from .blocked import RankState

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


# Collectives whose inputs must be alike on all ranks, with any backend.
_ALIKE = (
    *("all_reduce", "allreduce_coalesced", "all_reduce_coalesced", "sparse_all_reduce", "broadcast", "reduce"),
    *("_all_gather_base", "_reduce_scatter_base", "all_gather_into_tensor", "reduce_scatter_tensor"),
)


class GroupKey(NamedTuple):
    """A process group that was made at the same point by all its members. Groups may have the same name in turn."""

    name: str
    generation: int
    backend: str
    world: str = ""


@dataclass(frozen=True)
class GroupRecord:
    """A process group as one of its members knows it. `index`: this member's place among the `members`.

    `world`: what all members know alike about the world that the group belongs to.
    """

    name: str
    description: str
    members: tuple[int, ...]
    index: int
    world: str = ""

    @property
    def is_default(self) -> bool:
        return self.description == "default_pg"

    @property
    def title(self) -> str:
        if self.is_default:
            return "the default group"
        named = self.description if self.description not in ("", "undefined") else self.name
        return f"group {named}"


class Site(NamedTuple):
    """The line of the program that issued a collective."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line} in {self.function}"


@dataclass(frozen=True)
class Call:
    """One collective that a rank has issued. `place`: its number among this rank's collectives in the group, from 1."""

    kind: str
    place: int
    order: int  # in this rank, over all groups
    shapes: tuple[str, ...]
    inputs: tuple[str, ...]  # shapes with types
    agreement: tuple[Any, ...]  # the properties that must be equal on all members
    is_over: bool
    timeout: float  # seconds; infinite if unknown
    site: Site | None
    raised: bool = False  # it, or a later one of this rank
    details: tuple[str, ...] = ()  # what else a log tells: reduce operation, root, splits
    exchange: tuple[tuple[int, ...], ...] | None = None  # of an all_to_all: elements to and from each member
    is_p2p: bool = False
    peer: int | None = None  # of a send or receive, in the group; None: a receive from any rank
    tag: int = 0
    tells_end: bool = True  # a log does not know whether a call is over
    thread: int = 0  # of the rank, where a log tells it
    blocks: bool = False  # the rank goes on only when it is over
    layout: tuple[Any, ...] = ()  # the shapes of parts that are put together; () if they are flat
    parts: tuple[str, ...] = ()  # how torch puts parts together: placements of DTensors, or a dimension
    at: float = 0.0  # when it was issued, in seconds since 1970; 0 if unknown

    def __str__(self) -> str:
        return " ".join([self.name, *self.shapes])

    @property
    def name(self) -> str:
        return f"{self.kind} #{self.place}" if self.place else self.kind

    @property
    def agreement_of_message(self) -> tuple[Any, ...]:
        """The properties that a receive must share with the send of its message: numbers and types of elements."""
        return self.agreement[1:]

    @property
    def line(self) -> str:
        return f"line {self.site.line}" if self.site else "line unknown"


@dataclass(frozen=True)
class RankRecord:
    """All that a rank has issued, by group. `is_whole`: the flight recorder has not dropped any of it."""

    rank: int
    groups: Mapping[GroupKey, GroupRecord]
    calls: Mapping[GroupKey, Sequence[Call]]
    is_whole: bool
    state: RankState | None  # of its threads, if it was asked while it ran
    p2p: Mapping[GroupKey, str] = field(default_factory=dict)  # the latest send or receive, where it is recorded
    messages: Mapping[GroupKey, Sequence[Call]] = field(default_factory=dict)  # sends and receives of a log
    at: float = 0.0  # the moment of the record
    has_raised: bool = False  # a function of torch.distributed
    creating: GroupRecord | None = None  # the group that it was making

    @property
    def latest(self) -> Call | None:
        """The collective that it has issued last."""
        return max((calls[-1] for calls in self.calls.values()), key=lambda call: call.order, default=None)


def whole(records: Sequence[RankRecord]) -> dict[int, RankRecord]:
    """The records that lack nothing, by rank: only these can be compared call by call."""
    return {record.rank: record for record in records if record.is_whole}


# A mismatch shows at once or, if the bytes happen to fit, in one of the next calls.
_CALLS_UNTIL_ERROR = 2


def raised_for(calls: Sequence[tuple[int, int]], errors: Sequence[int]) -> set[int]:
    """Find the calls, each a time and a number, from which an error may have come: the latest before each error."""
    ordered = sorted(calls)
    times = [time for time, _ in ordered]
    found: set[int] = set()
    for error in errors:
        end = bisect_left(times, error)
        found.update(number for _, number in ordered[max(0, end - _CALLS_UNTIL_ERROR - 1) : end])
    return found


def agreement(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    """The properties of a collective that all members of its group must agree on, as far as the recorder knows them.

    Shapes may differ where the numbers of elements are equal. The recorder knows neither root nor reduce operation nor
    split sizes; a log does.
    """
    if "agreement" in entry:
        return _frozen(entry["agreement"])
    if "options" in entry:
        return (*_agreement(entry), *entry["options"])
    return _agreement(entry)


def _agreement(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    backend, kind = _backend_and_kind(entry)
    sizes = (entry.get(f"{which}_sizes") or () for which in ("input", "output"))
    inputs, outputs = (tuple(map(math.prod, each)) for each in sizes)
    in_types, out_types = (tuple(entry.get(f"{which}_dtypes") or ()) for which in ("input", "output"))
    match kind:
        case "scatter" if backend == "gloo":
            return kind, outputs, out_types
        case "all_gather" | "gather" if backend == "gloo":
            return kind, inputs, in_types
        case one if one in _ALIKE:
            return kind, inputs, in_types
        case _:
            # Other backends allow uneven inputs; of collectives with splits each rank has its own sizes.
            return kind, (), tuple(sorted({*in_types, *out_types}))


def _frozen(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(_frozen(value) if isinstance(value, list) else value for value in values)


def _backend_and_kind(entry: Mapping[str, Any]) -> tuple[str, str]:
    backend, _, kind = str(entry.get("profiling_name", "?")).rpartition(":")
    return backend, kind


def generations(groups: Sequence[GroupRecord]) -> list[int]:
    """For each group, how often its name had been used in its world before."""
    times: dict[tuple[str, str], itertools.count[int]] = {}
    return [next(times.setdefault((group.name, group.world), itertools.count())) for group in groups]


def make_record(
    rank: int,
    listed: Sequence[GroupRecord],
    entries: Sequence[Mapping[str, Any]],
    is_whole: bool,
    state: RankState | None = None,
    at: float = 0.0,
    has_raised: bool = False,
    creating: GroupRecord | None = None,
) -> RankRecord:
    """The record of a rank that has made the groups `listed`, from the entries of its recorder or its log."""
    groups: dict[GroupKey, GroupRecord] = {}
    calls: dict[GroupKey, list[Call]] = {}
    p2p: dict[GroupKey, str] = {}
    messages: dict[GroupKey, list[Call]] = {}
    used = generations(listed)
    for entry in sorted(entries, key=lambda entry: int(entry.get("record_id", 0))):
        number = entry.get("group")
        if number is None:
            continue
        backend, kind = _backend_and_kind(entry)
        key = GroupKey(listed[number].name, used[number], backend, listed[number].world)
        groups[key] = listed[number]
        if entry.get("is_p2p"):
            p2p[key] = kind
            if "tag" in entry:
                messages.setdefault(key, []).append(_message(entry, messages.get(key, ())))
            continue
        calls.setdefault(key, []).append(_call(entry, len(calls.get(key, ())) + 1))
    backends = {key.backend for key in groups} or {"gloo"}
    for number, group in enumerate(listed):
        for backend in backends:
            groups.setdefault(GroupKey(group.name, used[number], backend, group.world), group)
    return RankRecord(rank, groups, calls, is_whole, state, p2p, messages, at, has_raised, creating)


def _message(entry: Mapping[str, Any], earlier: Sequence[Call]) -> Call:
    """A send or receive: its place is that among those of its kind, peer and tag."""
    kind, peer, tag = _backend_and_kind(entry)[1], entry["peer"], int(entry["tag"])
    place = sum((one.kind, one.peer, one.tag) == (kind, peer, tag) for one in earlier) + 1
    return replace(_call(entry, place), is_p2p=True, peer=peer, tag=tag)


def _call(entry: Mapping[str, Any], place: int) -> Call:
    sizes, types = entry.get("input_sizes") or (), entry.get("input_dtypes") or ()
    shapes = [str(list(size)) for size in sizes]
    dtypes = [_DTYPES.get(name, name.lower()) for name in types]
    inputs = (f"{shape} {dtypes[at]}" if at < len(dtypes) else shape for at, shape in enumerate(shapes))
    site, timeout = entry.get("site"), entry.get("timeout_ms")
    return Call(
        kind=_backend_and_kind(entry)[1],
        place=place,
        order=int(entry.get("record_id", 0)),
        shapes=tuple(shapes),
        inputs=tuple(inputs),
        agreement=agreement(entry),
        is_over=bool(entry.get("retired")) and not _only_issued(entry) and not _was_given_up(entry),
        timeout=timeout / 1000 if timeout else math.inf,
        site=Site(*site) if site else None,
        raised=bool(entry.get("raised")),
        details=tuple(entry.get("details", ())),
        exchange=_frozen(entry["exchange"]) if "exchange" in entry else None,
        tells_end="retired" in entry and not _only_issued(entry),
        thread=int(entry.get("thread", 0)),
        blocks=bool(entry.get("blocks")),
        layout=_frozen(entry.get("layout", ())),
        parts=tuple(entry.get("parts", ())),
        at=entry.get("time_created_ns", 0) / 1e9,
    )


def _only_issued(entry: Mapping[str, Any]) -> bool:
    """Does the recorder give the call up when it is issued? It does for a backend that does not tell when it is over.

    gloo retires a call at its end, and calls it scheduled all the same.
    """
    backend, _ = _backend_and_kind(entry)
    return backend != "gloo" and bool(entry.get("retired")) and entry.get("state") == "scheduled"


def _was_given_up(entry: Mapping[str, Any]) -> bool:
    """Was the call retired before it was over, as one of NCCL is at its time-out?"""
    backend, _ = _backend_and_kind(entry)
    return backend != "gloo" and entry.get("state") == "started"


# -- the same group in all ranks


@dataclass(frozen=True)
class SharedGroup:
    """A process group, with the ranks that are its members."""

    key: GroupKey
    title: str
    ranks: tuple[int, ...]


def shared_groups(records: Sequence[RankRecord]) -> list[SharedGroup]:
    """The groups that several ranks know alike.

    A group is left out where ranks contradict each other, as when two worlds use the same name at once: its members are
    then not known for sure.
    """
    claims: dict[GroupKey, dict[int, GroupRecord]] = {}
    for record in records:
        for key, group in record.groups.items():
            claims.setdefault(key, {})[record.rank] = group
    keys = {record.rank: record.groups.keys() for record in records}

    def same_name(rank: int, key: GroupKey) -> set[tuple[int, str]]:
        """The groups of this name that a rank knows, of any backend: it may have issued nothing there."""
        return {(other.generation, other.world) for other in keys.get(rank, ()) if other.name == key.name}

    found = []
    for key, known in claims.items():
        members = {group.members for group in known.values()}
        by_index = {group.index: rank for rank, group in known.items()}
        if len(members) != 1 or len(by_index) != len(known):
            continue
        (numbers,) = members
        if len(numbers) < 2:
            continue
        if len(by_index) < len(numbers):
            # Some members are not known to have made the group yet: their numbers must be those of the launch, and
            # none may know it as another group of this name.
            if any(numbers[index] != rank for index, rank in by_index.items()):
                continue
            by_index = dict(enumerate(numbers))
            unknown = [same_name(rank, key) for rank in by_index.values() if rank not in known]
            if any(others and (key.generation, key.world) not in others for others in unknown):
                continue
        ranks = tuple(by_index[index] for index in sorted(by_index))
        found.append(SharedGroup(key, next(iter(known.values())).title, ranks))
    return found


def alike(calls: Mapping[int, Call], key: Callable[[Call], Any]) -> list[tuple[list[int], Call]]:
    """The ranks grouped by a property of their calls, the smallest group first, each with its first rank's call."""
    by_key = grouped((key(call), rank) for rank, call in sorted(calls.items()))
    return [(ranks, calls[ranks[0]]) for ranks in sorted(by_key.values(), key=len)]
