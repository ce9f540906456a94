"""Calls that some members of a group have issued and others have not."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from torch_testing_ext._collectives.records.issued_calls import (
    Call,
    RankRecord,
    SharedGroup,
    shared_groups,
    whole_records,
)
from torch_testing_ext._process.words import list_of

from .deadlocks import are_waiting, waiting_calls
from .finding import (
    CallsByRank,
    Candidate,
    Doing,
    Finding,
    FindingKind,
    calls_at,
    calls_in,
    doings_of,
    first_of,
    of_named_group,
)
from .message_pairs import Records, Wait
from .mismatches import first_mismatch

# A member may be done before all others have come: it only gives, or only gets from some.
_MAY_END_EARLY = ("broadcast", "reduce", "gather", "scatter")


def differences(records: Records) -> list[Finding]:
    """Explain ranks that hang: by the first mismatch or, for each group, by the members that lag behind the others.

    Only the *issuing* of a collective counts: gloo records its completion late, or never.
    """
    mismatch = first_mismatch(records)
    if mismatch is not None:
        return [mismatch]
    by_rank = whole_records(records)
    findings = [_behind(group, calls_in(group, by_rank), by_rank) for group in shared_groups(records)]
    return [finding for finding in findings if finding is not None]


def _behind(group: SharedGroup, calls: CallsByRank, by_rank: Mapping[int, RankRecord]) -> Finding | None:
    """The finding about members that have not come to the latest call of the others, if there are some."""
    most = max(map(len, calls.values()), default=0)
    if most == 0:
        return None
    latest = {rank: issued[-1] for rank, issued in calls.items() if len(issued) == most}
    behind = tuple(rank for rank in calls if rank not in latest)
    # One that has ended, perhaps by an error, keeps nobody.
    in_front = {
        rank: call
        for rank, call in latest.items()
        if not (call.raised or (call.tells_end and call.is_over) or by_rank[rank].has_destroyed(group.key))
    }
    if not behind or not in_front:
        return None
    call = next(iter(in_front.values()))
    sentence = f"{list_of(behind)} never reached {call.name}{of_named_group(group)}; {are_waiting(in_front)} in it"
    lines = tuple(Doing(rank, f"in {call}", call.site) for rank, call in in_front.items())
    return Finding(FindingKind.BEHIND, sentence, lines, behind)


def is_uneven(records: Records) -> bool:
    """Whether a rank has issued more in a group than another member."""
    by_rank = {record.rank: record for record in records}
    for group in shared_groups(records):
        counts = {len(issued) for issued in calls_in(group, by_rank).values()}
        if len(counts) > 1:
            return True
    return False


def first_uneven(records: Records) -> Finding | None:
    """A collective that some members have issued and others have not, although all ranks have passed.

    Nobody has missed it. Where something has raised, the ranks may have left it out for that. So has a call that needs
    all members, and is over without one.
    """
    if any(not record.is_whole for record in records):
        return None
    any_raised = any(record.has_raised for record in records) or any(
        call.raised for record in records for calls in record.calls.values() for call in calls
    )
    if any_raised:
        return None
    by_rank = {record.rank: record for record in records}
    candidates = []
    for group in shared_groups(records):
        calls_of_group = calls_in(group, by_rank)
        place = min(map(len, calls_of_group.values()), default=0) + 1
        issued = calls_at(place, calls_of_group)
        if not issued or len(calls_of_group) < len(group.ranks):
            continue
        if all(call.tells_end and call.is_over and call.kind not in _MAY_END_EARLY for call in issued.values()):
            continue
        gone = tuple(rank for rank in group.ranks if rank not in issued)
        first = next(iter(issued.values()))
        sentence = _leavers_in_words(gone, first, group, list(issued))
        finding = Finding(FindingKind.UNMATCHED, sentence, doings_of(issued), gone, is_hazard=True)
        candidates.append(Candidate(first.order, finding))
    return first_of(candidates)


def _leavers_in_words(gone: Sequence[int], call: Call, group: SharedGroup, issuers: Sequence[int]) -> str:
    return f"{list_of(gone)} left before {call.name}{of_named_group(group)}, which {list_of(issuers)} issued"


def first_unmatched(records: Records, only_messages: bool = False) -> Finding | None:
    """A call of ranks that have all passed which lacks members or its peer, and has not raised: nobody has missed it.

    `only_messages`: as a warning, and only if nothing has raised, since ranks may leave out a message for that.
    """
    known = {record.rank for record in records if record.is_whole}
    if only_messages and any(record.has_raised for record in records):
        return None
    candidates = []
    for wait in itertools.chain.from_iterable(waiting_calls(records).values()):
        call = wait.call
        if call.tells_end or call.raised or not known.issuperset(wait.missing):
            continue
        if only_messages and not call.is_p2p:
            continue
        lines = doings_of({wait.rank: call})
        finding = Finding(FindingKind.UNMATCHED, _unmatched(wait), lines, wait.missing, is_hazard=only_messages)
        candidates.append(Candidate(call.order, finding))
    return first_of(candidates)


def _unmatched(wait: Wait) -> str:
    """The sentence about a call of ranks that have passed, and its missing members."""
    if wait.call.is_p2p:
        what = "received" if wait.call.kind == "send" else "sent the message for"
        return f"nobody {what} rank {wait.rank}'s {wait.title}"
    issuers = tuple(rank for rank in wait.group.ranks if rank not in wait.missing)
    return _leavers_in_words(wait.missing, wait.call, wait.group, issuers)
