"""Waits at a store: for a key, or for the other members of a group that a rank makes or joins."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch_testing_ext._collectives.blocked.rank_state import RankState
from torch_testing_ext._collectives.findings.deadlocks import WHY_NO_CALL_ENDS, ranks_that_wait
from torch_testing_ext._collectives.findings.finding import Finding, FindingKind
from torch_testing_ext._collectives.findings.message_pairs import Records, Wait
from torch_testing_ext._collectives.records.issued_calls import (
    INIT,
    OWN,
    STORE,
    Call,
    GroupKey,
    GroupRecord,
    RankRecord,
    SharedGroup,
)
from torch_testing_ext._process.code_sites import Site
from torch_testing_ext._process.words import list_of, verb_for
from torch_testing_ext._tests.source_files import is_library

RecordsByRank = Mapping[int, RankRecord]
WaitsByRank = Mapping[int, list[Wait]]
# The number of such a wait among the calls of a rank: nothing comes after it.
_LATEST, _LATEST_OF_ALL = 1_000_000_000, 2_000_000_000


def waits_at_stores(running: RecordsByRank, known: Iterable[RankRecord], ranks: int) -> dict[int, Wait]:
    """The ranks that wait at a store, each with the ranks that may end that: members of its group, or any rank.

    A process that a rank has started may set a key, too. `ranks`: so many there are at least.
    """
    records = {record.rank: record for record in known}
    everybody = _everybody(records.values(), ranks)
    may_be_set = any(record.state is not None and record.state.children for record in running.values())
    waits = {}
    for rank, record in running.items():
        state = record.state
        if state is None or state.at_store is None:
            continue
        making = record.creating
        if making is None:
            if state.waits_at_store and not may_be_set:
                waits[rank] = _wait(record, state, STORE, "a store", everybody, _others(rank, everybody))
        elif not making.is_default:
            peers = [member for member in making.members if member != rank]
            late = tuple(peer for peer in peers if not _makes(records.get(peer), making))
            waits[rank] = _wait(record, state, "new_group", making.title, making.members, late)
    waits = {rank: wait for rank, wait in waits.items() if wait.missing}
    return waits if may_be_set else {**waits, **_waits_in_init(running, records.values(), everybody)}


def _wait(
    record: RankRecord, state: RankState, kind: str, title: str, members: tuple[int, ...], missing: tuple[int, ...]
) -> Wait:
    """The wait of a rank at a store. Any rank may set a key; a group needs all of its members."""
    sites = [Site(*frame) for frame in state.frames if not is_library(frame[0])]
    call = Call(
        kind,
        order=_LATEST + len(record.groups),
        timeout=math.inf if state.at_store is None else state.at_store,
        site=sites[0] if sites else None,
    )
    group = SharedGroup(GroupKey(title, 0, "store"), title, members)
    is_for_key = kind == STORE
    any_of = bool(missing) and kind in (STORE, OWN)
    return Wait(record.rank, group, call, missing, any_of, keys=state.keys if is_for_key else ())


def _everybody(known: Iterable[RankRecord], ranks: int) -> tuple[int, ...]:
    members = {member for record in known for group in record.groups.values() for member in group.members}
    return tuple(sorted(members.union(range(ranks))))


def _others(rank: int, everybody: Iterable[int]) -> tuple[int, ...]:
    return tuple(other for other in everybody if other != rank)


def waits_in_own_process(
    running: RecordsByRank, known: Iterable[RankRecord], waiting: WaitsByRank, ranks: int
) -> dict[int, Wait]:
    """The ranks that wait for something of their own process. Any other rank may send a signal that ends that.

    So may the end of a call, by a callback: if the end of one is not known, no rank is missing. Those that a log says
    the rank has waited for are over, unless another thread waits for them. A rank whose other thread is in a call waits
    for that: its main thread only waits for this thread.
    """
    everybody = _everybody(known, ranks)
    waits = {}
    for rank, record in running.items():
        state = record.state
        if state is None or not state.waits_in_own_process or (waiting.get(rank) and state.has_thread_in_torch):
            continue
        calls = [call for in_group in record.calls.values() for call in in_group]
        may_end = any(not call.tells_end and (state.others or not call.blocks) for call in calls)
        missing = () if may_end or record.creating is not None else _others(rank, everybody)
        waits[rank] = _wait(record, state, OWN, "its process", everybody, missing)
    return waits


def _makes(record: RankRecord | None, group: GroupRecord) -> bool:
    """Whether a rank makes this group now, or has made it."""
    if record is None:
        return False
    return any(other.members == group.members for other in _of_that_name(record, group))


def suspected_creation(records: Records) -> Finding | None:
    """Suspect the members for which a rank that makes a group, or joins a world, waits: they do not."""
    making: dict[int, GroupRecord] = {}
    for record in records:
        if record.creating is not None and not record.creating.is_default:
            making[record.rank] = record.creating
    known = {record.rank for record in records}
    for group in making.values():
        makers = [record.rank for record in records if _of_that_name(record, group)]
        absent = sorted(known.intersection(group.members).difference(makers))
        if absent:
            return _absent(group, [rank for rank in makers if rank in making], absent)
    return _suspected_absence(records)


def _absent(group: GroupRecord, makers: Sequence[int], absent: Sequence[int]) -> Finding:
    """The finding about members that have not begun to make a group."""
    are = verb_for(makers, "is", "are")
    have = verb_for(absent, "has", "have")
    title = f"{group.title} ({list_of(group.members)})"
    sentence = f"{list_of(makers)} {are} creating {title}; {list_of(absent)} {have} not started to create it"
    return Finding(FindingKind.DEADLOCK, f"suspected deadlock: {sentence}", (sentence,), tuple(absent))


def _of_that_name(record: RankRecord, group: GroupRecord) -> list[GroupRecord]:
    """The latest group of that name and world that a rank has made, or makes now."""
    identity = (group.name, group.world)
    making = record.creating
    if making is not None and (making.name, making.world) == identity:
        return [making]
    made = [other for other in record.groups.values() if (other.name, other.world) == identity]
    return made[-1:]


@dataclass(frozen=True)
class _Joining:
    """A rank on its way into a world. `time`: how often it had joined one of this name at this store before."""

    record: RankRecord
    group: GroupRecord
    time: int

    @property
    def world(self) -> tuple[str, str, int]:
        return self.group.name, self.group.world, self.time


def _waits_in_init(
    running: Mapping[int, RankRecord], known: Iterable[RankRecord], everybody: Iterable[int]
) -> dict[int, Wait]:
    """The ranks that wait for others in `init_process_group`. Any rank that is not there may come as a missing one.

    Those at one store are taken for one world, whatever the prefixes of their keys: then too few ranks wait here.
    """
    joining = [_joining(record, record.creating) for record in running.values() if _joins(record)]
    taken = _taken(joining, known)
    has_several = len({each.group.world for each in joining}) > 1
    waits = {}
    for each in joining:
        absent = tuple(place for place in range(len(each.group.members)) if place not in taken[each.world])
        there = [other.record.rank for other in joining if other.world == each.world]
        others = tuple(rank for rank in everybody if rank not in there)
        if absent:
            where = f" at {os.path.basename(each.group.world)}" if has_several else ""
            waits[each.record.rank] = _wait_in_init(each, absent, others, f"{INIT}{where}{_twice(each, joining)}")
    return waits


def _twice(one: _Joining, joining: Iterable[_Joining]) -> str:
    """The ranks that have come as the same one of the world, in words; "" if there is only this one."""
    place = one.group.index
    alike = [each.record.rank for each in joining if (each.world, each.group.index) == (one.world, place)]
    return f", where {list_of(alike)} are all rank {place}" if len(alike) > 1 else ""


def _joins(record: RankRecord) -> bool:
    return record.creating is not None and record.creating.is_default


def _joining(record: RankRecord, group: GroupRecord | None) -> _Joining:
    assert group is not None
    made = {key.generation for key in record.groups if (key.name, key.world) == (group.name, group.world)}
    return _Joining(record, group, len(made))


def _taken(joining: Iterable[_Joining], known: Iterable[RankRecord]) -> dict[tuple[str, str, int], set[int]]:
    """The places in each world as which some rank has come."""
    taken: dict[tuple[str, str, int], set[int]] = {}
    for each in joining:
        taken.setdefault(each.world, set()).add(each.group.index)
    for record in known:
        for key, group in record.groups.items():
            taken.setdefault((key.name, key.world, key.generation), set()).add(group.index)
    return taken


def _wait_in_init(each: _Joining, absent: tuple[int, ...], others: tuple[int, ...], title: str) -> Wait:
    state = each.record.state
    frames = () if state is None else state.frames
    site = next((Site(*frame) for frame in frames if not is_library(frame[0])), None)
    # Only a rank that has been asked while it waited is known to wait so long.
    timeout = 0.0 if state is None or state.at_store is None else state.at_store
    group = SharedGroup(GroupKey(title, 0, "store"), title, each.group.members)
    call = Call(INIT, order=_LATEST_OF_ALL + each.time, timeout=timeout, site=site)
    return Wait(each.record.rank, group, call, others, any_of=True, absent=absent)


def _suspected_absence(records: Records) -> Finding | None:
    """Suspect that nobody comes to a world that ranks wait to join."""
    ranks = [record.rank for record in records]
    waits = _waits_in_init({record.rank: record for record in records}, records, ranks)
    if not waits:
        return None
    sentence = f"{ranks_that_wait(waits)}, {WHY_NO_CALL_ENDS[INIT]}"
    return Finding(FindingKind.DEADLOCK, sentence, (sentence,), tuple(waits))
