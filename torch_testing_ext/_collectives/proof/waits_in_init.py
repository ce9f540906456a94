"""Waits in `init_process_group`, until somebody has come to the store as each rank of the new world."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch_testing_ext._collectives.failure import Site
from torch_testing_ext._collectives.findings.deadlocks import WHY_NO_CALL_ENDS, ranks_that_wait
from torch_testing_ext._collectives.findings.finding import Finding, FindingKind
from torch_testing_ext._collectives.findings.message_pairs import Records, Wait
from torch_testing_ext._collectives.records.issued_calls import (
    INIT,
    Call,
    GroupKey,
    GroupRecord,
    RankRecord,
    SharedGroup,
)
from torch_testing_ext._process.words import list_of
from torch_testing_ext._tests.source_files import is_library

# The number of such a wait among the calls of a rank: nothing comes after it.
_LATEST = 2_000_000_000


@dataclass(frozen=True)
class _Joining:
    """A rank on its way into a world. `time`: how often it had joined one of this name at this store before."""

    record: RankRecord
    group: GroupRecord
    time: int

    @property
    def world(self) -> tuple[str, str, int]:
        return self.group.name, self.group.world, self.time


def waits_in_init(
    running: Mapping[int, RankRecord], known: Iterable[RankRecord], everybody: Iterable[int]
) -> dict[int, Wait]:
    """The ranks that wait for others in `init_process_group`. Any rank that is not there may come as a missing one.

    Those with the same store are taken for one world, whatever the prefixes of their keys: then too few ranks wait here.
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
            waits[each.record.rank] = _wait(each, absent, others, f"{INIT}{where}{_twice(each, joining)}")
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


def _wait(each: _Joining, absent: tuple[int, ...], others: tuple[int, ...], title: str) -> Wait:
    state = each.record.state
    frames = () if state is None else state.frames
    site = next((Site(*frame) for frame in frames if not is_library(frame[0])), None)
    # Only a rank that has been asked while it waited is known to wait so long.
    timeout = 0.0 if state is None or state.at_store is None else state.at_store
    group = SharedGroup(GroupKey(title, 0, "store"), title, each.group.members)
    call = Call(INIT, order=_LATEST + each.time, timeout=timeout, site=site)
    return Wait(each.record.rank, group, call, others, any_of=True, absent=absent)


def suspected_absence(records: Records) -> Finding | None:
    """Suspect that nobody comes to a world that ranks wait to join."""
    ranks = [record.rank for record in records]
    waits = waits_in_init({record.rank: record for record in records}, records, ranks)
    if not waits:
        return None
    sentence = f"{ranks_that_wait(waits)}, {WHY_NO_CALL_ENDS[INIT]}"
    return Finding(FindingKind.DEADLOCK, sentence, (sentence,), tuple(waits))
