"""Groups for which ranks give other members: a rank that is no member has to name them, too."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch_testing_ext._collectives.records.issued_calls import MemberList
from torch_testing_ext._process.words import grouped, list_of, verb_for

from .finding import Doing, Finding, FindingKind
from .message_pairs import Records


def first_unlike_lists(records: Records) -> Finding | None:
    """The first group of a name and a world for which ranks have given other members.

    Each rank may give itself alone: such groups share nothing, not even keys of the store.
    """
    lists = {record.rank: _numbered(record.lists) for record in records if not record.has_raised}
    keys = dict.fromkeys(key for of_rank in lists.values() for key in of_rank)
    for key in keys:
        given = {rank: of_rank[key] for rank, of_rank in lists.items() if key in of_rank}
        are_alone = all(each.members == (rank,) for rank, (_, each) in given.items())
        if len({each.members for _, each in given.values()}) > 1 and not are_alone:
            return _unlike(given)
    return None


def _numbered(lists: Sequence[MemberList]) -> dict[tuple[str, str, int], tuple[int, MemberList]]:
    """The lists of a rank by name, world, and how often both had come before; each with its number in that world."""
    used: dict[tuple[str, str], itertools.count[int]] = {}
    of_world: dict[str, itertools.count[int]] = {}
    numbered = {}
    for each in lists:
        time = next(used.setdefault((each.name, each.world), itertools.count()))
        numbered[each.name, each.world, time] = next(of_world.setdefault(each.world, itertools.count(1))), each
    return numbered


def _unlike(given: dict[int, tuple[int, MemberList]]) -> Finding:
    by_members = grouped((each.members, rank) for rank, (_, each) in sorted(given.items()))
    ways = sorted(by_members.items(), key=lambda way: (len(way[1]), way[1]))
    (first_members, first_ranks), *others = ways
    create = verb_for(first_ranks, "creates", "create")
    parts = [
        f"{list_of(ranks)} {verb_for(ranks, 'creates', 'create')} one of {list_of(members)}"
        for members, ranks in others
    ]
    number, _ = given[first_ranks[0]]
    where = f"in new_group #{number}"
    sentence = f"{list_of(first_ranks)} {create} a group of {list_of(first_members)}, but {', '.join(parts)} {where}"
    lines = tuple(
        Doing(rank, f"new_group #{number} of {list_of(each.members)}", each.site)
        for rank, (number, each) in given.items()
    )
    return Finding(FindingKind.MISMATCH, sentence, lines, tuple(first_ranks))
