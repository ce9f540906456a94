"""Ranks that have ended without a collective that others wait in."""

from __future__ import annotations

from collections.abc import Sequence

from torch_testing_ext._collectives.records.issued_calls import SharedGroup, shared_groups, whole_records

from .deadlocks import sentence_of_abandoned
from .finding import CallsByRank, Candidate, Doing, Ended, Finding, FindingKind, calls_at, calls_in, first_of
from .message_pairs import Records, Wait, unpaired


def first_abandoned(records: Records, ended: Ended, waiting: Sequence[int]) -> Finding | None:
    """A rank that ended by itself without a collective that ranks of `waiting` have issued.

    Whether a collective has completed does not matter here: the ranks of `waiting` have lost their peer or hang.
    """
    by_rank = whole_records(records)
    candidates = []
    for group in shared_groups(records):
        calls = calls_in(group, by_rank)
        for rank in group.ranks:
            if rank in ended and rank in calls:
                place = len(calls[rank]) + 1
                candidates += _abandoned_at(group, place, calls, ended, waiting)
    for wait in unpaired(records):
        gone = tuple(rank for rank in wait.missing if rank in ended)
        is_endless = bool(gone) and (not wait.any_of or len(gone) == len(wait.missing))
        if is_endless and wait.rank in waiting:
            sentence = sentence_of_abandoned(gone, ended, wait, [wait.rank])
            lines = (Doing(wait.rank, f"in {wait.title}", wait.call.site),)
            candidates.append(Candidate(wait.call.order, Finding(FindingKind.ABANDONED, sentence, lines, gone)))
    return first_of(candidates)


def _abandoned_at(
    group: SharedGroup,
    place: int,
    calls: CallsByRank,
    ended: Ended,
    waiting: Sequence[int],
) -> list[Candidate]:
    """The finding about ranks that have ended before their call of this place, if ranks of `waiting` are in it."""
    calls_there = calls_at(place, calls)
    issued = {rank: calls_there[rank] for rank in waiting if rank in calls_there}
    if not issued:
        return []
    known = [rank for rank in group.ranks if rank in calls]
    gone = tuple(rank for rank in known if rank in ended and rank not in calls_there)
    first, call = next(iter(issued.items()))
    sentence = sentence_of_abandoned(gone, ended, Wait(first, group, call, gone), list(issued))
    lines = tuple(Doing(rank, f"in {issue}", issue.site) for rank, issue in issued.items())
    return [Candidate(call.order, Finding(FindingKind.ABANDONED, sentence, lines, gone))]
