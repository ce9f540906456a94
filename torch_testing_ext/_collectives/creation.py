"""Waits at a store: for a key, or for the other members of a group that a rank makes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch_testing_ext._process.whole_files import is_library
from torch_testing_ext._process.words import grouped, list_of

from .findings import STORE, Finding, FindingKind
from .pairs import Wait
from .records import Call, GroupKey, GroupRecord, RankRecord, SharedGroup, Site

_LATEST = 1_000_000_000  # the number of such a wait among the calls of a rank: nothing comes after it


def waits_at_stores(running: Mapping[int, RankRecord], known: Iterable[RankRecord]) -> dict[int, Wait]:
    """The ranks that wait at a store, each with the ranks that may end that: members of its group, or any rank.

    A process that a rank has started may set a key, too.
    """
    records = {record.rank: record for record in known}
    everybody = {rank for record in records.values() for group in record.groups.values() for rank in group.members}
    may_be_set = any(record.state is not None and record.state.children for record in running.values())
    found = {}
    for rank, record in running.items():
        making = record.creating
        state = record.state
        if state is None or state.at_store is None or (making is not None and making.is_default):
            continue
        if making is None and (not state.waits_at_store or may_be_set):
            continue
        here = next((Site(*frame) for frame in state.frames if not is_library(frame[0])), None)
        if making is None:
            missing = tuple(sorted(everybody - {rank}))
            members, title, kind = tuple(sorted(everybody)), "a store", STORE
        else:
            missing = tuple(one for one in making.members if one != rank and not _makes(records.get(one), making))
            members, title, kind = making.members, making.title, "new_group"
        if missing:
            call = Call(kind, 0, _LATEST + len(record.groups), (), (), (), False, state.at_store, here)
            key = GroupKey(title, 0, "store")
            found[rank] = Wait(rank, SharedGroup(key, title, members), call, missing, any_of=making is None)
    return found


def _makes(record: RankRecord | None, group: GroupRecord) -> bool:
    """Does a rank make this group now, or has it made it?"""
    return record is not None and any(one.members == group.members for one in _of_that_name(record, group))


def suspected_creation(records: Sequence[RankRecord]) -> Finding | None:
    """Suspect the members for which a rank that makes a group waits: they make another one, or none."""
    making = {one.rank: one.creating for one in records if one.creating is not None and not one.creating.is_default}
    for group in making.values():
        others = [(record.rank, each) for record in records for each in _of_that_name(record, group)]
        if any(_are_unlike(group, each) for _, each in others):
            return _unlike(
                [(other, each) for other, each in others if _are_unlike(group, each) or each.members == group.members]
            )
    for group in making.values():
        there = [record.rank for record in records if _of_that_name(record, group)]
        absent = sorted({record.rank for record in records}.intersection(group.members).difference(there))
        if absent:
            return _absent(group, [rank for rank in there if rank in making], absent)
    return None


def _absent(group: GroupRecord, there: Sequence[int], absent: Sequence[int]) -> Finding:
    makes, has = "makes" if len(there) == 1 else "make", "has" if len(absent) == 1 else "have"
    title = f"{group.title} ({list_of(group.members)})"
    sentence = f"{list_of(there)} {makes} {title}, which {list_of(absent)} {has} not begun to make"
    return Finding(FindingKind.DEADLOCK, f"suspected: {sentence}", (sentence,), tuple(absent))


def _of_that_name(record: RankRecord, group: GroupRecord) -> list[GroupRecord]:
    """The latest group of that name and world that a rank has made, or makes now."""
    made = [each for each in record.groups.values() if (each.name, each.world) == (group.name, group.world)]
    now = record.creating
    if now is not None and (now.name, now.world) == (group.name, group.world):
        return [now]
    return made[-1:]


def _are_unlike(one: GroupRecord, other: GroupRecord) -> bool:
    """Do two groups of one name have other members, some in common? Ranks may split into groups of the same name."""
    return one.members != other.members and not set(one.members).isdisjoint(other.members)


def _unlike(found: Sequence[tuple[int, GroupRecord]]) -> Finding:
    by_members = grouped((group.members, rank) for rank, group in found)
    (first, here), *others = sorted(by_members.items(), key=lambda one: one[1])
    makes = "makes" if len(here) == 1 else "make"
    parts = [f"{list_of(ranks)} {'makes' if len(ranks) == 1 else 'make'} one of {list_of(m)}" for m, ranks in others]
    sentence = f"{list_of(here)} {makes} a group of {list_of(first)} where {', '.join(parts)}"
    lines = [f"{list_of(ranks)}: {found[0][1].title} of {list_of(m)}" for m, ranks in [(first, here), *others]]
    return Finding(FindingKind.DEADLOCK, f"suspected: {sentence}", tuple(lines), tuple(here[:1]))
