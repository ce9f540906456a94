"""The collectives that a rank has issued, as the rules read them.

Three sources give them, each as calls with the number of their group: torch's flight recorders (`unpack_record`), the
log of `--sanitize`, and ranks that are threads.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch_testing_ext._collectives.blocked.rank_state import RankState
from torch_testing_ext._collectives.lanes_of_ranks import TimedCall
from torch_testing_ext._process.code_sites import Site
from torch_testing_ext._process.words import grouped

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
# The wait for the other ranks of a new world.
INIT = "init_process_group"


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


class MemberList(NamedTuple):
    """The members that a rank has given for a group which all ranks of a world make, itself a member or not."""

    name: str
    world: str
    members: tuple[int, ...]
    site: Site | None

    @classmethod
    def made(cls, name: str, world: str, members: Sequence[int], place: Sequence[Any] | None) -> MemberList:
        """A list from its fields in the process that has given it."""
        return cls(name, world, tuple(members), Site(*place) if place else None)


@dataclass(frozen=True)
class Call:
    """One collective that a rank has issued. `place`: its number among this rank's collectives in the group, from 1.

    A record gives it its place: before that, it is 0.
    """

    kind: str
    place: int = 0
    # The number of the call in this rank, over all groups.
    order: int = 0
    shapes: tuple[str, ...] = ()
    # Shapes with types, as they are shown.
    inputs: tuple[str, ...] = ()
    # Those that the rank hands over, where that is known: none of a receive, and of a scatter only its root's.
    given: tuple[str, ...] = ()
    # The properties that must be equal on all members.
    agreement: tuple[Any, ...] = ()
    is_over: bool = False
    # The time-out in seconds; infinite if unknown.
    timeout: float = math.inf
    site: Site | None = None
    # It has raised, or a later one of this rank.
    raised: bool = False
    # The rank that gives or gets the data, as the group numbers it; None if there is none, or it is not known.
    root: int | None = None
    # What else is known, in words: reduce operation, root, splits.
    details: tuple[str, ...] = ()
    # The elements that an all_to_all moves to and from each member.
    exchange: tuple[tuple[int, ...], ...] | None = None
    is_p2p: bool = False
    # The other rank of a send or receive, as the group numbers it; None: a receive from any rank.
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
    # The time at which it was issued, in seconds since 1970; 0 if unknown.
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
    # The state of the rank's threads, if it was asked while it ran.
    state: RankState | None
    # The latest send or receive, where it is recorded.
    p2p: Mapping[GroupKey, str] = field(default_factory=dict)
    # Sends and receives.
    messages: Mapping[GroupKey, Sequence[Call]] = field(default_factory=dict)
    # The moment of the record.
    at: float = 0.0
    # Whether a function of torch.distributed has raised.
    has_raised: bool = False
    # The group that it was making.
    creating: GroupRecord | None = None
    # Its sends and receives are all that there were.
    has_all_messages: bool = True
    # The lists of members, in the order of their groups.
    lists: tuple[MemberList, ...] = ()
    # The groups that it still had while it ran, by name, generation and world; None if that is not known.
    living: frozenset[tuple[str, int, str]] | None = None
    # The threads of its program that an exception has ended: the name of each, and that exception with its line.
    dead_threads: tuple[tuple[str, str], ...] = ()

    def has_destroyed(self, key: GroupKey) -> bool:
        """Whether the rank has destroyed a group, and with it the calls in it, and runs."""
        return self.living is not None and (key.name, key.generation, key.world) not in self.living

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
    first: int = 0,
) -> RankRecord:
    """The record of a rank that has made the groups `listed`, and issued these calls there.

    `first`: the first of them that this process of the rank has made.
    """
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
    for number, group in enumerate(listed[first:], first):
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
        known = record.groups[key]
        group = f"{known.title}, {key.generation}"
        for call in calls:
            if call.at:
                site = str(call.site or "")
                timed.append(TimedCall(str(call), group, call.place, call.at, call.is_over, site, known.members))
    if not timed:
        return ()
    timed.sort(key=lambda call: call.at)
    latest = timed[-1]
    if any(calls[-1].at == latest.at and calls[-1].raised for calls in record.calls.values()):
        timed[-1] = latest._replace(is_over=False)
    most = max(_LEAST_OF_A_RANK, _MOST_CALLS // ranks)
    return tuple(timed[-most:])


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
            groups.append(SharedGroup(key, _title_of(known), ranks))
    return groups


def _title_of(known: Mapping[int, GroupRecord]) -> str:
    """The title that most members give to a group, with another one if there is one."""
    named = grouped((group.title, rank) for rank, group in known.items())
    most = max(named, key=lambda title: len(named[title]))
    others = (f", which rank {ranks[0]} calls {title}" for title, ranks in named.items() if title != most)
    return most + next(others, "")


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
    """Whether a rank knows groups of this name, of any backend, but not this one. It may have issued nothing there."""
    of_that_name = {(key.generation, key.world) for key in keys if key.name == wanted.name}
    return bool(of_that_name) and (wanted.generation, wanted.world) not in of_that_name


def ranks_grouped_by(calls: Mapping[int, Call], key: Callable[[Call], Any]) -> list[tuple[list[int], Call]]:
    """The ranks grouped by a property of their calls, the smallest group first, each with its first rank's call."""
    by_key = grouped((key(call), rank) for rank, call in sorted(calls.items()))
    return [(ranks, calls[ranks[0]]) for ranks in sorted(by_key.values(), key=len)]
