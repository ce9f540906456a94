"""Groups that ranks were making when they hung: members that do not agree on one wait for each other at the store."""

from __future__ import annotations

from collections.abc import Sequence

from .findings import Finding, FindingKind
from .records import GroupRecord, RankRecord, list_of


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
    by_members: dict[tuple[int, ...], list[int]] = {}
    for rank, group in found:
        by_members.setdefault(group.members, []).append(rank)
    (first, here), *others = sorted(by_members.items(), key=lambda one: one[1])
    makes = "makes" if len(here) == 1 else "make"
    parts = [f"{list_of(ranks)} {'makes' if len(ranks) == 1 else 'make'} one of {list_of(m)}" for m, ranks in others]
    sentence = f"{list_of(here)} {makes} a group of {list_of(first)} where {', '.join(parts)}"
    lines = [f"{list_of(ranks)}: {found[0][1].title} of {list_of(m)}" for m, ranks in [(first, here), *others]]
    return Finding(FindingKind.DEADLOCK, f"suspected: {sentence}", tuple(lines), tuple(here[:1]))
