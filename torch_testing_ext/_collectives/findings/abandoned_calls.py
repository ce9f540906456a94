"""Ranks that have ended without a call that others wait in, or while a call was under way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch_testing_ext._collectives.records.issued_calls import (
    Call,
    RankRecord,
    SharedGroup,
    shared_groups,
    whole_records,
)
from torch_testing_ext._process.words import list_of

from .deadlocks import abandoned_by
from .finding import (
    CallsByRank,
    Candidate,
    Doing,
    Ended,
    Finding,
    FindingKind,
    calls_at,
    calls_in,
    first_of,
    of_named_group,
)
from .message_pairs import Records, Wait, unpaired


def first_abandoned(records: Records, ended: Ended, waiting: Sequence[int]) -> Finding | None:
    """A rank that ended by itself without a collective that ranks of `waiting` have issued.

    Whether a collective has completed does not matter here: the ranks of `waiting` have lost their peer or hang.
    """
    by_rank = whole_records(records)
    waits = _latest_waits(records, by_rank, waiting)
    candidates = []
    for group in shared_groups(records):
        calls = calls_in(group, by_rank)
        for rank in group.ranks:
            if rank in ended and rank in calls:
                place = len(calls[rank]) + 1
                candidates += _abandoned_at(group, place, calls, ended, waiting, waits, records)
    for wait in _unpaired(records, by_rank, waiting):
        gone = tuple(rank for rank in wait.missing if rank in ended)
        is_endless = bool(gone) and (not wait.any_of or len(gone) == len(wait.missing))
        if is_endless and wait.rank in waiting:
            lines = _lines({**waits, wait.rank: wait})
            finding = abandoned_by(gone, ended, wait, [wait.rank], waits, lines, records)
            candidates.append(Candidate(wait.call.order, finding))
    return first_of(candidates)


def _abandoned_at(
    group: SharedGroup,
    place: int,
    calls: CallsByRank,
    ended: Ended,
    waiting: Sequence[int],
    waits: Mapping[int, Wait],
    records: Records,
) -> list[Candidate]:
    """The finding about ranks that have ended before their call of this place, if ranks of `waiting` are in it."""
    calls_there = calls_at(place, calls)
    issued = {rank: calls_there[rank] for rank in waiting if rank in calls_there}
    if not issued:
        return []
    known = [rank for rank in group.ranks if rank in calls]
    gone = tuple(rank for rank in known if rank in ended and rank not in calls_there)
    there = {rank: Wait(rank, group, issue, gone) for rank, issue in issued.items()}
    first = next(iter(there.values()))
    lines = _lines({**waits, **there})
    finding = abandoned_by(gone, ended, first, list(issued), waits, lines, records)
    return [Candidate(first.call.order, finding)]


def _latest_waits(records: Records, by_rank: Mapping[int, RankRecord], waiting: Sequence[int]) -> dict[int, Wait]:
    """The latest call of each of these ranks, if it lacks members, or its partner."""
    waits: dict[int, Wait] = {}
    for group in shared_groups(records):
        calls = calls_in(group, by_rank)
        for rank in waiting:
            if issued := calls.get(rank):
                missing = tuple(member for member in group.ranks if len(calls.get(member, ())) < len(issued))
                _keep_latest(waits, Wait(rank, group, issued[-1], missing))
    for wait in unpaired(records):
        if wait.rank in waiting:
            _keep_latest(waits, wait)
    return {rank: wait for rank, wait in waits.items() if wait.missing}


def _keep_latest(waits: dict[int, Wait], wait: Wait) -> None:
    known = waits.get(wait.rank)
    if known is None or known.call.order < wait.call.order:
        waits[wait.rank] = wait


def _lines(waits: Mapping[int, Wait]) -> tuple[Doing, ...]:
    return tuple(_line(wait) for _, wait in sorted(waits.items()))


def _line(wait: Wait) -> Doing:
    title = f"{wait.title}{of_named_group(wait.group)}"
    return Doing(wait.rank, f"in {title}", wait.call.site, wait.missing)


def _unpaired(records: Records, by_rank: Mapping[int, RankRecord], waiting: Sequence[int]) -> Iterator[Wait]:
    """The messages without a partner. Where a rank receives from any, one of `waiting` may have sent what is left."""
    for wait in unpaired(records):
        if wait.by_number and wait.rank not in waiting:
            for rank in waiting:
                call = _latest_send(by_rank.get(rank), wait)
                if call is not None:
                    yield replace(wait, rank=rank, call=call)
        else:
            yield wait


def _latest_send(record: RankRecord | None, wait: Wait) -> Call | None:
    """The latest call of a rank, if that is a message of the same kind, tag and receiver."""
    messages = () if record is None else record.messages.get(wait.group.key, ())
    if not messages or messages[-1].kind != wait.call.kind or wait.call.kind != "send":
        return None
    latest = messages[-1]
    return latest if (latest.peer, latest.tag) == (wait.call.peer, wait.call.tag) else None


class _LatestCall(NamedTuple):
    """The latest call of a rank, with its group in words."""

    call: Call
    words: str

    @property
    def is_under_way(self) -> bool:
        return self.call.tells_end and not self.call.is_over


def latest_call_in_words(record: RankRecord) -> _LatestCall | None:
    """The latest collective or message of a rank; None if there is none."""
    issued = [
        (call.order, call, record.groups[key])
        for calls_of_groups in (record.calls, record.messages)
        for key, calls in calls_of_groups.items()
        for call in calls[-1:]
    ]
    if not issued:
        return None
    _, call, group = max(issued, key=lambda each: each[0])
    return _LatestCall(call, f"{call.name}{'' if group.is_default else f' of {group.title}'}")


def ended_under_way(records: Records, passed: Sequence[int], lost: Sequence[int]) -> Finding | None:
    """Ranks that have passed, by which others have lost their peer: those with a call under way, if there are some.

    None if nothing is known of the calls.
    """
    found = {rank: latest_call_in_words(record) for rank, record in whole_records(records).items()}
    latest = {rank: call for rank, call in found.items() if call is not None}
    under_way = tuple(rank for rank in passed if rank in latest and latest[rank].is_under_way)
    gone = under_way or tuple(passed)
    if not latest.keys() & set(lost):
        return None
    lines = {rank: _lost_peer(rank, latest.get(rank), gone) for rank in lost}
    for rank in under_way:
        lines[rank] = Doing(rank, f"passed, with {latest[rank].words} under way", latest[rank].call.site)
    first = next(latest[rank] for rank in (*under_way, *lost) if rank in latest)
    had = f"which ended while {first.words} was under way" if under_way else "which had ended"
    where = "" if under_way else f" in {first.words}"
    sentence = f"{list_of(lost)} lost {list_of(gone)}{where}, {had}"
    return Finding(FindingKind.ABANDONED, sentence, tuple(line for _, line in sorted(lines.items())), gone)


def _lost_peer(rank: int, latest: _LatestCall | None, gone: tuple[int, ...]) -> Doing:
    if latest is None:
        return Doing(rank, "lost its peer", None)
    return Doing(rank, f"lost a peer in {latest.words}", latest.call.site, gone, latest.words)
