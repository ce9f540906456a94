"""The collectives that a rank has issued: the record that it leaves, and what that says."""

from __future__ import annotations

import heapq
import itertools
import math
import pickle
from bisect import bisect, bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch_testing_ext._process import messages
from torch_testing_ext._process.words import grouped

from .blocked import RankState
from .failure import Site, TimedCall

# --------------------------------------------------------------------------------------------------------------------
# The collectives that a rank has issued, as the rules read them.
#
# Three sources give them, each as calls with the number of their group: torch's flight recorders (`unpack_record`), the
# log of `--sanitize`, and ranks that are threads.

# The latest calls of all ranks together that are kept in lanes.
_MOST_CALLS = 2_000
_LEAST_OF_A_RANK = 4

# Collectives whose inputs must be alike on all ranks, with any backend.
_ALIKE = (
    *("all_reduce", "allreduce_coalesced", "all_reduce_coalesced", "sparse_all_reduce", "broadcast", "reduce"),
    *("_all_gather_base", "_reduce_scatter_base", "all_gather_into_tensor", "reduce_scatter_tensor"),
)


# The kinds of waits that are no calls: at a store, and for what only the rank's own process can end, as a lock does.
STORE, OWN = "get", "wait"


class GroupKey(NamedTuple):
    """A process group that was made at the same point by all its members. Groups may have the same name in turn."""

    name: str
    generation: int
    backend: str
    world: str = ""


@dataclass(frozen=True)
class GroupRecord:
    """A process group as one of its members knows it. `index`: this member's place among the `members`.

    `world`: what all members know alike about the world that the group belongs to. `is_reconfigured`: a group of this
    name got other members, as this one.
    """

    name: str
    description: str
    members: tuple[int, ...]
    index: int
    world: str = ""
    is_reconfigured: bool = False

    @classmethod
    def made(cls, fields: Sequence[Any]) -> GroupRecord:
        """A group from its fields in the process that has made it. The last one is the time of that."""
        return cls(*fields[:-1])

    @property
    def is_default(self) -> bool:
        return self.description == "default_pg"

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which a test may call it: its own, its description, and that of its dimension of a mesh."""
        return self.name, self.description, self.description.removeprefix("mesh_")

    @property
    def title(self) -> str:
        if self.is_default:
            return "the default group"
        named = self.description if self.description not in ("", "undefined") else self.name
        return f"group {named}"


@dataclass(frozen=True)
class Call:
    """One collective that a rank has issued. `place`: its number among this rank's collectives in the group, from 1.

    A record gives it its place: before that, it is 0.
    """

    kind: str
    place: int = 0
    # In this rank, over all groups.
    order: int = 0
    shapes: tuple[str, ...] = ()
    # Shapes with types.
    inputs: tuple[str, ...] = ()
    # The properties that must be equal on all members.
    agreement: tuple[Any, ...] = ()
    is_over: bool = False
    # In seconds; infinite if unknown.
    timeout: float = math.inf
    site: Site | None = None
    # It has raised, or a later one of this rank.
    raised: bool = False
    # What else a log tells: reduce operation, root, splits.
    details: tuple[str, ...] = ()
    # Of an all_to_all: the elements to and from each member.
    exchange: tuple[tuple[int, ...], ...] | None = None
    is_p2p: bool = False
    # Of a send or receive, in the group; None: a receive from any rank.
    peer: int | None = None
    tag: int = 0
    # A log does not know whether a call is over.
    tells_end: bool = True
    # The number of the thread in the rank, where a log tells it.
    thread: int = 0
    # The rank goes on only when the call is over.
    blocks: bool = False
    # The shapes of parts that are put together; () if they are flat.
    layout: tuple[tuple[int, ...], ...] = ()
    # How torch puts parts together: placements of DTensors, or a dimension.
    parts: tuple[str, ...] = ()
    # When it was issued, in seconds since 1970; 0 if unknown.
    at: float = 0.0

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


class SeenError(NamedTuple):
    """An error of a call of torch.distributed. `sites`: the lines that have led to it, innermost first.

    `at`: in nanoseconds since 1970. `function`: "" if it has raised in a wait. `lost_peer`: another rank had ended.
    """

    at: int
    function: str
    lost_peer: bool
    sites: tuple[Site, ...]

    @classmethod
    def of(cls, at: int, function: str, lost_peer: bool, places: Sequence[tuple[str, int, str]]) -> SeenError:
        return cls(at, function, lost_peer, tuple(Site(*place) for place in places))

    @property
    def title(self) -> str:
        return self.function or "a wait"


class CallInGroup(NamedTuple):
    """A call of a rank with the number of its group among those that the rank has made, and the group's backend.

    Without a number the call is left out: its group is not known, or is not compared. `knows_peer`: of a send or
    receive; torch's flight recorders do not know its peer and its tag.
    """

    call: Call
    group: int | None
    backend: str
    knows_peer: bool = True


@dataclass(frozen=True)
class RankRecord:
    """All that a rank has issued, by group. `is_whole`: the flight recorder has not dropped any of it."""

    rank: int
    groups: Mapping[GroupKey, GroupRecord]
    calls: Mapping[GroupKey, Sequence[Call]]
    is_whole: bool
    # Of its threads, if it was asked while it ran.
    state: RankState | None
    # The latest send or receive, where it is recorded.
    p2p: Mapping[GroupKey, str] = field(default_factory=dict)
    # Sends and receives.
    messages: Mapping[GroupKey, Sequence[Call]] = field(default_factory=dict)
    # The moment of the record.
    at: float = 0.0
    # A function of torch.distributed.
    has_raised: bool = False
    # The group that it was making.
    creating: GroupRecord | None = None
    errors: Sequence[SeenError] = ()
    # Its sends and receives are all that there were.
    has_all_messages: bool = True

    @property
    def latest(self) -> Call | None:
        """The collective that it has issued last."""
        return max((calls[-1] for calls in self.calls.values()), key=lambda call: call.order, default=None)


def whole_records(records: Sequence[RankRecord]) -> dict[int, RankRecord]:
    """The records that lack nothing, by rank: only these can be compared call by call."""
    return {record.rank: record for record in records if record.is_whole}


# A mismatch shows at once or, if the bytes happen to fit, in one of the next calls.
_CALLS_UNTIL_ERROR = 2


def raised_for(calls: Sequence[tuple[int, int]], errors: Sequence[int]) -> set[int]:
    """Find the calls, each a time and a number, from which an error may have come: the latest before each error."""
    ordered = sorted(calls)
    times = [time for time, _ in ordered]
    numbers: set[int] = set()
    for error in errors:
        end = bisect_left(times, error)
        start = max(0, end - _CALLS_UNTIL_ERROR - 1)
        numbers.update(number for _, number in ordered[start:end])
    return numbers


def agreement_of(kind: str, counts: Sequence[int], types: Sequence[str], other_types: Sequence[str]) -> tuple[Any, ...]:
    """The properties of a collective that all members of its group must agree on, whatever its backend.

    `counts` and `types`: of the elements of each input. Shapes may differ where these are equal. `other_types`: those
    of the outputs.
    """
    if kind in _ALIKE:
        return kind, tuple(counts), tuple(types)
    # Many backends allow uneven inputs; of collectives with splits each rank has its own sizes.
    return kind, (), tuple(sorted({*types, *other_types}))


def generations(groups: Sequence[GroupRecord]) -> list[int]:
    """For each group, how often its name had been used in its world before."""
    times: dict[tuple[str, str], itertools.count[int]] = {}
    return [next(times.setdefault((group.name, group.world), itertools.count())) for group in groups]


def make_record(
    rank: int,
    listed: Sequence[GroupRecord],
    issued: Iterable[CallInGroup],
    is_whole: bool,
    state: RankState | None = None,
    at: float = 0.0,
    has_raised: bool = False,
    creating: GroupRecord | None = None,
) -> RankRecord:
    """The record of a rank that has made the groups `listed`, and issued these calls there."""
    groups: dict[GroupKey, GroupRecord] = {}
    calls: dict[GroupKey, list[Call]] = {}
    p2p: dict[GroupKey, str] = {}
    messages: dict[GroupKey, list[Call]] = {}
    used = generations(listed)
    for call, number, backend, knows_peer in sorted(issued, key=lambda issue: issue.call.order):
        if number is None:
            continue
        group = listed[number]
        key = GroupKey(group.name, used[number], backend, group.world)
        groups[key] = group
        if call.is_p2p:
            p2p[key] = call.kind
            if knows_peer:
                earlier = messages.setdefault(key, [])
                earlier.append(replace(call, place=_place_of_message(call, earlier)))
        else:
            in_group = calls.setdefault(key, [])
            in_group.append(replace(call, place=len(in_group) + 1))
    backends = {key.backend for key in groups} or {"gloo"}
    for number, group in enumerate(listed):
        for backend in backends:
            groups.setdefault(GroupKey(group.name, used[number], backend, group.world), group)
    return RankRecord(rank, groups, calls, is_whole, state, p2p, messages, at, has_raised, creating)


def _place_of_message(call: Call, earlier: Sequence[Call]) -> int:
    """The place of a send or receive is that among those of its kind, peer and tag."""
    alike = (call.kind, call.peer, call.tag)
    return sum((other.kind, other.peer, other.tag) == alike for other in earlier) + 1


def calls_of(record: RankRecord, ranks: int) -> tuple[TimedCall, ...]:
    """The latest calls of one of so many ranks."""
    timed = []
    for key, calls in record.calls.items():
        group = f"{record.groups[key].title}, {key.generation}"
        for call in calls:
            if call.at:
                timed.append(TimedCall(str(call), group, call.place, call.at, call.is_over, str(call.site or "")))
    if not timed:
        return ()
    timed.sort(key=lambda call: call.at)
    latest = timed[-1]
    if any(calls[-1].at == latest.at and calls[-1].raised for calls in record.calls.values()):
        timed[-1] = latest._replace(is_over=False)
    most = max(_LEAST_OF_A_RANK, _MOST_CALLS // ranks)
    return tuple(timed[-most:])


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
    keys = {record.rank: set(record.groups) for record in records}
    groups = []
    for key, known in claims.items():
        ranks = _members_of(key, known, keys)
        if ranks is not None and len(ranks) > 1:
            first = next(iter(known.values()))
            groups.append(SharedGroup(key, first.title, ranks))
    return groups


def _members_of(
    key: GroupKey, known: Mapping[int, GroupRecord], keys: Mapping[int, set[GroupKey]]
) -> tuple[int, ...] | None:
    """The ranks of a group, by what the ranks that know it say; None if they contradict each other."""
    members = {group.members for group in known.values()}
    by_index = {group.index: rank for rank, group in known.items()}
    if len(members) != 1 or len(by_index) != len(known):
        return None
    (numbers,) = members
    if len(by_index) == len(numbers):
        return tuple(by_index[index] for index in sorted(by_index))
    # Some members are not known to have made the group yet: their numbers must be those of the launch, and none may
    # know it as another group of this name.
    if any(numbers[index] != rank for index, rank in by_index.items()):
        return None
    others = (rank for rank in numbers if rank not in known)
    if any(_knows_another(keys.get(rank, set()), key) for rank in others):
        return None
    return numbers


def _knows_another(keys: Iterable[GroupKey], wanted: GroupKey) -> bool:
    """Does a rank know groups of this name, of any backend, but not this one? It may have issued nothing there."""
    of_that_name = {(key.generation, key.world) for key in keys if key.name == wanted.name}
    return bool(of_that_name) and (wanted.generation, wanted.world) not in of_that_name


def ranks_grouped_by(calls: Mapping[int, Call], key: Callable[[Call], Any]) -> list[tuple[list[int], Call]]:
    """The ranks grouped by a property of their calls, the smallest group first, each with its first rank's call."""
    by_key = grouped((key(call), rank) for rank, call in sorted(calls.items()))
    return [(ranks, calls[ranks[0]]) for ranks in sorted(by_key.values(), key=len)]


# --------------------------------------------------------------------------------------------------------------------
# The record that a rank leaves at the end of a test: the recorders' own pickles, which cost it least, and its groups.
#
# The parent reads them. Ranks that agree are compared as they are; only of ranks that do not, records are made.

# Of the deprecated functions of torch.distributed, and of its context managers.
_DECORATORS = ("/typing_extensions.py", "/contextlib.py")

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


def pack_record(
    groups: Sequence[tuple[Any, ...]],
    dumps: Sequence[tuple[int, bytes]],
    errors: Sequence[tuple[int, str, bool, Sequence[tuple[str, int, str]]]],
    folder: str,
    at: float,
    state: RankState | None = None,
    sequences: Mapping[str, tuple[int, int, int]] | None = None,
    creating: tuple[Any, ...] | None = None,
) -> bytes:
    """Pack the record of a rank.

    `groups`: those that it has made, as the fields of a GroupRecord and the time of their making; `creating`: the one
    that it is making. `dumps`: of its recorders, each after the number of the first entry that counts. `errors`: the
    fields of a SeenError for each. `folder`: of torch. `at`: the moment. `state`: of its threads. `sequences`: the
    sequence numbers of its groups, None if unknown: then there may be messages that nobody has noted.
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

    @property
    def backend(self) -> str:
        return _backend_of(self.fields)


class RawRecord:
    """The record that a rank has left, read. `is_whole`: no recorder has dropped entries that count."""

    def __init__(self, data: bytes):
        listed, dumps, errors, self._folder, self.at, state, sequences, creating = pickle.loads(data)
        self.errors = [SeenError.of(*fields) for fields in errors]
        self._has_all_messages = True
        self.groups = [GroupRecord.made(fields) for fields in listed]
        self._creating = GroupRecord.made(creating) if creating is not None else None
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
        may_have_sent = sequences is None or self._has_gaps(sequences)
        self._has_all_messages &= not may_have_sent
        if state:
            seen = messages.decode(RankState, state)
            awaited = None if seen.message is None else self._order_of_message(seen.message)
            self._state = replace(seen, p2p=may_have_sent, message=awaited)

    def _entries_of(self, dump: bytes, first: int) -> list[_Entry]:
        """The entries of a recorder that count: from this number on."""
        entries: list[Mapping[str, Any]] = []
        if dump:
            content = pickle.loads(dump)
            entries = content.get("entries", [])
            self._has_all_messages &= content.get("messages", True)
        if entries and int(entries[0]["record_id"]) > first:
            self.is_whole = False
        counting = [_Entry(fields, None) for fields in entries if fields["record_id"] >= first]
        return self._with_groups(counting)

    def _has_gaps(self, sequences: Mapping[str, tuple[int, int, int]]) -> bool:
        """May the rank have sent or received what is not noted? Each message uses up a number of its group.

        Those of the collectives do not count messages.
        """
        in_groups = grouped((entry.group, entry) for entry in self._entries)
        for name, (number, before, used_up) in sequences.items():
            entries = in_groups.get(name, [])
            messages = sum("message" in entry.fields and entry.fields["is_issued"] for entry in entries)
            collectives = [entry.fields["collective_seq_id"] for entry in entries if not entry.fields["is_p2p"]]
            if number != max(collectives, default=before) + used_up + messages:
                return True
        return False

    def _order_of_message(self, number: int) -> int | None:
        """The order of the message that has this number among the messages."""
        return next(
            (entry.fields["record_id"] for entry in self._entries if entry.fields.get("message") == number), None
        )

    def _with_groups(self, entries: Sequence[_Entry]) -> list[_Entry]:
        """The entries with the number of their group: the latest one of that name, unless another one may have it."""
        latest = [self._latest(entry.group, entry.created) for entry in entries]
        pairs = {
            ((self._origin(number), entry.backend), entry.fields["pg_id"])
            for entry, number in zip(entries, latest, strict=True)
            if number is not None
        }
        ids_of = grouped(pairs)
        numbers_of = grouped((pg_id, number) for number, pg_id in pairs)
        sure = {of for of, ids in ids_of.items() if len(ids) == 1 and len(numbers_of[ids[0]]) == 1}
        return [
            entry._replace(number=number)
            if number is not None and (self._origin(number), entry.backend) in sure
            else entry
            for entry, number in zip(entries, latest, strict=True)
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

    def calls(self) -> dict[GroupKey, list[tuple[Any, ...]]]:
        """The calls in each group, with the properties that can be compared cheaply."""
        keys = keys_of(self.groups)
        calls: dict[GroupKey, list[tuple[Any, ...]]] = {}
        for fields, number in self._entries:
            if number is not None and not fields["is_p2p"]:
                call = fields["profiling_name"], fields["input_sizes"], fields["input_dtypes"]
                calls.setdefault(keys[number], []).append(call)
        return calls

    def messages(self) -> Iterator[tuple[GroupKey, str, tuple[int | None, ...], tuple[Any, ...]]]:
        """The sends and receives: group, kind, source, target and tag as numbers, and what it is."""
        keys = keys_of(self.groups)
        for fields, number in self._entries:
            if number is not None and "message" in fields:
                here, peer, kind = self.groups[number].index, fields["peer"], fields["profiling_name"].partition(":")[2]
                source, target = (here, peer) if kind == "send" else (peer, here)
                what = _agreement(fields, "", "message")
                yield keys[number], kind, (source, target, fields["tag"]), what

    def record(self, rank: int) -> RankRecord:
        """All that the rank has issued, if this is its number."""
        has_raised = bool(self.errors)
        record = make_record(
            rank, self.groups, self._issued(), self.is_whole, self._state, self.at, has_raised, self._creating
        )
        return replace(record, errors=self.errors, has_all_messages=self._has_all_messages)

    def _issued(self) -> Iterator[CallInGroup]:
        raised = self._raised()
        for at, (fields, number) in enumerate(self._entries):
            yield read_entry(fields, number, self._site(fields), at in raised)

    def _raised(self) -> set[int]:
        """The entries after which something has raised."""
        if not self.errors:
            return set()
        calls = grouped((entry.group, (entry.created, at)) for at, entry in enumerate(self._entries))
        moments = [error.at for error in self.errors]
        return {at for in_group in calls.values() for at in raised_for(in_group, moments)}

    def _site(self, entry: Mapping[str, Any]) -> Site | None:
        for frame in entry.get("frames", ()):
            name = frame["filename"]
            if not name.startswith((self._folder, "<")) and not name.endswith(_DECORATORS):
                return Site(name, frame["line"], frame["name"])
        return None


# The backend of fake accelerators. gloo computes and records for it, and has this as the description of the group.
_THROUGH_GLOO = "fakeccl"


def _backend_of(entry: Mapping[str, Any]) -> str:
    """The backend of the group that has issued the call: a group may have one for each kind of device."""
    if _THROUGH_GLOO in entry.get("process_group", ()):
        return _THROUGH_GLOO
    return str(entry.get("profiling_name", "?")).rpartition(":")[0]


def read_entry(entry: Mapping[str, Any], group: int | None, site: Site | None, raised: bool = False) -> CallInGroup:
    """The call of an entry of torch's flight recorder. `group`: the number of its group among those of the rank."""
    backend, _, kind = str(entry.get("profiling_name", "?")).rpartition(":")
    shapes = tuple(str(list(size)) for size in entry.get("input_sizes") or ())
    dtypes = [_DTYPES.get(name, name.lower()) for name in entry.get("input_dtypes") or ()]
    # There may be fewer types than shapes.
    typed = itertools.zip_longest(shapes, dtypes[: len(shapes)], fillvalue="")
    inputs = tuple(f"{shape} {dtype}".rstrip() for shape, dtype in typed)
    timeout_ms = entry.get("timeout_ms")
    is_retired = bool(entry.get("retired"))
    state = entry.get("state")
    # Another backend than gloo may not tell when a call is over: it is retired as soon as it is issued. gloo retires a
    # call at its end, and leaves it "scheduled" all the same.
    is_only_issued = backend != "gloo" and is_retired and state == "scheduled"
    # It is retired before it is over, as a call of NCCL is at its time-out.
    was_given_up = backend != "gloo" and state == "started"
    is_message = "message" in entry
    call = Call(
        kind=kind,
        order=int(entry.get("record_id", 0)),
        shapes=shapes,
        inputs=inputs,
        agreement=_agreement(entry, backend, kind),
        peer=entry.get("peer"),
        tag=int(entry.get("tag", 0)),
        is_over=is_retired and not is_only_issued and not was_given_up,
        timeout=timeout_ms / 1000 if timeout_ms else math.inf,
        site=site,
        raised=raised,
        is_p2p=bool(entry.get("is_p2p")),
        tells_end="retired" in entry and not is_only_issued,
        at=entry.get("time_created_ns", 0) / 1e9,
    )
    return CallInGroup(call, group, _backend_of(entry), knows_peer=is_message)


def _agreement(entry: Mapping[str, Any], backend: str, kind: str) -> tuple[Any, ...]:
    """The properties that all members must agree on; the recorder knows no root, reduce operation or splits."""
    inputs = tuple(math.prod(size) for size in entry.get("input_sizes") or ())
    outputs = tuple(math.prod(size) for size in entry.get("output_sizes") or ())
    input_types = tuple(entry.get("input_dtypes") or ())
    output_types = tuple(entry.get("output_dtypes") or ())
    if backend == "gloo" and kind == "scatter":
        return kind, outputs, output_types
    if (backend == "gloo" and kind in ("all_gather", "gather")) or "message" in entry:
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
    """Have all members of every group issued the same, and lost no peer? If not, look closer.

    The inputs of a scatter are its root's.
    """
    seen: dict[GroupKey, list[tuple[Any, ...]]] = {}
    for record in records:
        if record is None:
            continue
        if any(error.lost_peer for error in record.errors):
            return False
        issued = record.calls()
        for key in keys_of(record.groups):
            calls = issued.get(key, [])
            if seen.setdefault(key, calls) != calls:
                return False
        if not record.is_whole:
            return False
    return _do_messages_fit([record for record in records if record is not None])


def _do_messages_fit(records: Sequence[RawRecord]) -> bool:
    """Has each message been sent and received alike? If a rank receives from any, it is not known who has sent."""
    sent, received = (
        grouped(
            ((key, route), what) for record in records for key, each, route, what in record.messages() if each == kind
        )
        for kind in ("send", "recv")
    )
    return sent == received
