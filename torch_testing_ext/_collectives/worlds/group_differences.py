"""Groups that ranks have made in different orders, or that some members have not made."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from torch_testing_ext._collectives.findings.finding import Doing, Finding, FindingKind
from torch_testing_ext._collectives.records.issued_calls import GroupKey
from torch_testing_ext._process.code_sites import Site
from torch_testing_ext._process.words import list_of, verb_for

from .world_records import WorldRecords


def first_group_difference(world: WorldRecords) -> Finding | None:
    """The first group that not all of its members have made: under its name, or at all."""
    made: dict[tuple[GroupKey, tuple[int, ...]], list[int]] = defaultdict(list)
    for record in world.records:
        for key, group in record.groups.items():
            made[key, group.members].append(record.rank)
    for (key, members), makers in made.items():
        absent = sorted(set(members).difference(makers))
        if absent:
            return _group_difference(world, key, members, makers, absent)
    return None


def _group_difference(
    world: WorldRecords, key: GroupKey, members: Sequence[int], makers: Sequence[int], absent: Sequence[int]
) -> Finding:
    known = world.records[makers[0]].groups[key]
    title = f"{known.title} of {list_of(members)}"
    lines = [Doing(rank, f"makes {title}", _site_of_group(world, rank, key)) for rank in makers]
    others = {rank: world.records[rank].groups.get(key) for rank in absent if rank < len(world.records)}
    has = verb_for(absent, "has", "have")
    sentence = f"{list_of(makers)} {verb_for(makers, 'makes', 'make')} {title}, which {list_of(absent)} {has} not made"
    unlike = {rank: group for rank, group in others.items() if group is not None}
    if unlike:
        first = next(iter(unlike))
        sentence += f": there, rank {first} makes one of {list_of(unlike[first].members)}"
    for rank, group in others.items():
        if group is None:
            lines.append(Doing(rank, f"does not make {known.title}", None))
        else:
            did = f"makes {group.title} of {list_of(group.members)}"
            lines.append(Doing(rank, did, _site_of_group(world, rank, key)))
    return Finding(FindingKind.MISMATCH, sentence, tuple(lines), tuple(absent))


def _site_of_group(world: WorldRecords, rank: int, key: GroupKey) -> Site | None:
    return world.class_of[rank].sites[world.keys[rank].index(key)]
