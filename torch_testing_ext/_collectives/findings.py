"""Findings about collectives: ranks that disagree, ranks in a deadlock, ranks left alone."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .pairs import Pair, pairs_of, unpaired
from .records import Call, RankRecord, SharedGroup, Site, alike, list_of, shared_groups

_CALLS_BEFORE = 3
_WIDEST_COLUMN = 60


class FindingKind(enum.Enum):
    """A kind of fault in the collectives of a test."""

    MISMATCH = "mismatch"
    DEADLOCK = "deadlock"
    LEFT_ALONE = "left alone"
    BEHIND = "behind"  # members of a group that hangs have not come to the latest call of the others
    UNMATCHED = "unmatched"  # a call that lacks its peers, although all ranks have passed
    ORDER = "order"  # opposite orders that happened to pass
    UNWAITED = "unwaited"
    RACE = "race"
    NAN = "nan"
    RECORDER = "recorder"  # the sanitizer itself has failed


@dataclass(frozen=True)
class Finding:
    """One fault: a sentence for the title, lines with each rank's call, and the rank that is blamed first."""

    kind: FindingKind
    sentence: str
    lines: tuple[str, ...]
    ranks: tuple[int, ...]
    is_hazard: bool = False  # only to be said: the test passes
    awaited: tuple[int, ...] = ()  # ranks that have not come to the call yet
    table: tuple[str, ...] = ()  # what the ranks called until then, side by side

    @property
    def text(self) -> str:
        return f"=> {self.sentence}\n{self.calls}"

    @property
    def calls(self) -> str:
        lines = "\n".join(f"  {line}" for line in self.lines)
        return "\n".join([f"{lines}\n", *(f"  {row}" for row in self.table)]) if self.table else lines


def _whole(records: Sequence[RankRecord]) -> dict[int, RankRecord]:
    """The records that lack nothing, by rank: only these can be compared call by call."""
    return {record.rank: record for record in records if record.is_whole}


def _calls_in(group: SharedGroup, by_rank: Mapping[int, RankRecord]) -> dict[int, Sequence[Call]]:
    """The calls of each member whose record is known."""
    return {rank: by_rank[rank].calls.get(group.key, ()) for rank in group.ranks if rank in by_rank}


def _of_group(group: SharedGroup) -> str:
    return "" if group.title == "the default group" else f" of {group.title}"


# -- mismatch


def first_mismatch(records: Sequence[RankRecord], unless_raised: bool = False) -> Finding | None:
    """The first collective of a group in which members disagree; of several groups, the one that was issued first.

    `unless_raised`: leave out a mismatch after which a collective has raised. The ranks have not failed for that: the
    test expects it.
    """
    by_rank = _whole(records)
    found: list[tuple[int, Finding]] = []
    for group in shared_groups(records):
        calls = _calls_in(group, by_rank)
        for place in range(1, max(map(len, calls.values()), default=0) + 1):
            here = {rank: issued[place - 1] for rank, issued in calls.items() if len(issued) >= place}
            finding = None
            if len({call.agreement for call in here.values()}) > 1:
                finding = _mismatch(group, place, here, calls)
            elif any(call.exchange is not None for call in here.values()):
                finding = _wrong_exchange(group, place, here)
            if finding is not None:
                if not (unless_raised and any(call.raised for call in here.values())):
                    found.append((min(call.order for call in here.values()), finding))
                break
    for pair in pairs_of(records):
        if pair.differs and not (unless_raised and (pair.send.raised or pair.receive.raised)):
            found.append((min(pair.send.order, pair.receive.order), _wrong_pair(pair)))
    return min(found, key=lambda one: one[0])[1] if found else None


def _mismatch(group: SharedGroup, place: int, here: Mapping[int, Call], calls: Mapping[int, Sequence[Call]]) -> Finding:
    groups = alike(here, lambda call: (call.kind, call.inputs, call.agreement))
    parts = [f"{list_of(ranks)} {'calls' if len(ranks) == 1 else 'call'} {_described(call)}" for ranks, call in groups]
    where = f"call #{place} of {group.title} ({list_of(group.ranks)})"
    return Finding(
        FindingKind.MISMATCH,
        f"ranks disagree in {where}: {', '.join(parts)}",
        tuple(f"rank {rank}: {_described(call)}{_at(call)}" for rank, call in sorted(here.items())),
        tuple(groups[0][0]),
        awaited=tuple(rank for rank in group.ranks if rank not in here),
        table=_side_by_side(groups, place, calls) if place > 1 else (),
    )


def _side_by_side(
    groups: Sequence[tuple[Sequence[int], Call]], place: int, calls: Mapping[int, Sequence[Call]]
) -> tuple[str, ...]:
    """The calls that lead to a mismatch, a column for all ranks that agree there, with a mark where they differ."""
    first = max(1, place - _CALLS_BEFORE)
    columns = []
    for ranks, _ in groups:
        texts = [list_of(ranks), *map(_described, calls[ranks[0]][first - 1 : place])]
        texts = [text if len(text) <= _WIDEST_COLUMN else f"{text[: _WIDEST_COLUMN - 3]}..." for text in texts]
        columns.append([text.ljust(max(map(len, texts))) for text in texts])
    titles = ["", *(f"#{number}" for number in range(first, place + 1))]
    rows = zip(titles, *columns, strict=True)
    width = max(map(len, titles))
    lines = [f"  {title.rjust(width)}  {'  '.join(texts)}".rstrip() for title, *texts in rows]
    return (*lines[:-1], f">{lines[-1][1:]}")


def _wrong_exchange(group: SharedGroup, place: int, here: Mapping[int, Call]) -> Finding | None:
    """The first pair of ranks of which one sends another number of elements than the other expects."""
    for at, sender in enumerate(group.ranks):
        for to, receiver in enumerate(group.ranks):
            outgoing, incoming = (here[rank].exchange if rank in here else None for rank in (sender, receiver))
            if outgoing is None or incoming is None or max(at, to) >= min(len(outgoing[0]), len(incoming[1])):
                continue
            if outgoing[0][to] != incoming[1][at]:
                where = f"call #{place} of {group.title} ({list_of(group.ranks)})"
                what = f"rank {sender} sends {outgoing[0][to]} elements to rank {receiver}, which expects"
                return Finding(
                    FindingKind.MISMATCH,
                    f"ranks disagree in {where}: {what} {incoming[1][at]}",
                    tuple(f"rank {rank}: {_described(call)}{_at(call)}" for rank, call in sorted(here.items())),
                    (sender, receiver),
                )
    return None


def _wrong_pair(pair: Pair) -> Finding:
    sent, received = (" ".join(call.inputs) for call in (pair.send, pair.receive))
    where = f"message #{pair.send.place} of {pair.group.title}"
    return Finding(
        FindingKind.MISMATCH,
        f"ranks disagree in {where}: rank {pair.source} sends {sent} to rank {pair.target}, which receives {received}",
        (
            f"rank {pair.source}: send {sent} to rank {pair.target}{_at(pair.send)}",
            f"rank {pair.target}: recv {received} from rank {pair.source}{_at(pair.receive)}",
        ),
        (pair.source, pair.target),
    )


def _described(call: Call) -> str:
    return " ".join([call.kind, *call.inputs, *call.details])


def _at(call: Call) -> str:
    return f"   {call.site}" if call.site else ""


# -- waiting


@dataclass(frozen=True)
class Wait:
    """A collective of a rank that is not over, with the members of its group that have not issued it."""

    rank: int
    group: SharedGroup
    call: Call
    missing: tuple[int, ...]
    any_of: bool = False  # one of the missing is enough: a receive from any rank

    @property
    def name(self) -> str:
        """The call as it is named in a sentence; of a message with its peer."""
        if not self.call.is_p2p:
            return self.call.name
        direction = "to" if self.call.kind == "send" else "from"
        peer = "any rank" if self.call.peer is None else f"rank {self.group.ranks[self.call.peer]}"
        tag = f", tag {self.call.tag}" if self.call.tag else ""
        return f"{self.call.kind} #{self.call.place} {direction} {peer}{tag}"

    @property
    def title(self) -> str:
        return " ".join([self.name, *self.call.shapes])


def waits(records: Sequence[RankRecord]) -> dict[int, list[Wait]]:
    """The collectives of each rank that are not over, in the order of the calls.

    A member of whose collectives nothing is known counts as missing.
    """
    by_rank = _whole(records)
    found: dict[int, list[Wait]] = {}
    for group in shared_groups(records):
        counts = {rank: len(by_rank[rank].calls.get(group.key, ())) if rank in by_rank else 0 for rank in group.ranks}
        for rank in group.ranks:
            for call in by_rank[rank].calls.get(group.key, ()) if rank in by_rank else ():
                missing = tuple(other for other in group.ranks if counts[other] < call.place)
                if not call.is_over and (missing or call.tells_end):
                    found.setdefault(rank, []).append(Wait(rank, group, call, missing))
    for wait in _waits_for_messages(records):
        if not wait.call.is_over:
            found.setdefault(wait.rank, []).append(wait)
    return {rank: sorted(calls, key=lambda wait: wait.call.order) for rank, calls in found.items()}


def _waits_for_messages(records: Sequence[RankRecord]) -> list[Wait]:
    return [Wait(one.rank, one.group, one.call, one.missing, one.call.peer is None) for one in unpaired(records)]


def deadlocked(waiting: Mapping[int, Sequence[Wait]], ended: Mapping[int, str]) -> dict[int, Wait]:
    """The ranks that cannot go on if each waits for one of its collectives, with the one that keeps it from going on.

    `ended`: the ranks that issue nothing any more. A rank may go on as long as one of its collectives lacks no member,
    and is just being executed, or lacks only ranks that may go on.
    """
    left = dict(waiting)
    while True:
        endless = {rank: [_never_ends(wait, left, ended) for wait in calls] for rank, calls in left.items()}
        free = [rank for rank, found in endless.items() if not all(found)]
        if not free:
            return {rank: calls[-1] for rank, calls in left.items()}
        for rank in free:
            del left[rank]


def _never_ends(wait: Wait, left: Mapping[int, object], ended: Mapping[int, str]) -> bool:
    never = (member in left or member in ended for member in wait.missing)
    return all(never) if wait.any_of else any(never)


def describe_deadlock(deadlocked: Mapping[int, Wait], ended: Mapping[int, str], suspected: bool = False) -> Finding:
    """The finding about ranks that cannot go on: left alone by a rank that has ended, or in a cycle."""
    lines = tuple(
        f"rank {rank}: waits in {wait.group.title} ({wait.title}) for {list_of(wait.missing)}{_at(wait.call)}"
        for rank, wait in sorted(deadlocked.items())
    )
    left = _left_alone(deadlocked, ended)
    if left is not None:
        return Finding(FindingKind.LEFT_ALONE, left[0], lines, left[1])
    cycle = _cycle(deadlocked)
    parts = []
    for at, rank in enumerate(cycle):
        wait, then = deadlocked[rank], cycle[(at + 1) % len(cycle)]
        subject = f"rank {rank}" if at == 0 else "which"
        parts.append(f"{subject} waits in {wait.group.title} ({wait.name}, {wait.call.line}) for rank {then}")
    sentence = ", ".join(parts)
    return Finding(FindingKind.DEADLOCK, f"suspected: {sentence}" if suspected else sentence, lines, tuple(cycle))


def _left_alone(deadlocked: Mapping[int, Wait], ended: Mapping[int, str]) -> tuple[str, tuple[int, ...]] | None:
    for _, wait in sorted(deadlocked.items()):
        gone = tuple(rank for rank in wait.missing if rank in ended)
        if gone:
            same = [
                rank
                for rank, other in deadlocked.items()
                if other.group.key == wait.group.key and other.call.place == wait.call.place
            ]
            return left_alone_sentence(gone, ended, wait, same), gone
    return None


def left_alone_sentence(gone: Sequence[int], ended: Mapping[int, str], wait: Wait, waiting: Sequence[int]) -> str:
    """Name the ranks that ended without the collective that others wait in."""
    how = ended[gone[0]]
    verb = "waits" if len(waiting) == 1 else "wait"
    if wait.call.is_p2p:
        doing = "receiving" if wait.call.kind == "send" else "sending"
        return f"{list_of(gone)} {how} without {doing} that for which {list_of(waiting)} {verb} ({wait.title})"
    return f"{list_of(gone)} {how} without {wait.call}{_of_group(wait.group)}, in which {list_of(waiting)} {verb}"


def _cycle(deadlocked: Mapping[int, Wait]) -> list[int]:
    """Follow each rank to the first that it waits for until one comes again."""
    path: list[int] = []
    rank = min(deadlocked)
    while rank not in path:
        path.append(rank)
        rank = next(member for member in deadlocked[rank].missing if member in deadlocked)
    return path[path.index(rank) :]


def first_left_alone(records: Sequence[RankRecord], ended: Mapping[int, str], waiting: Sequence[int]) -> Finding | None:
    """A rank that ended by itself without a collective that ranks of `waiting` have issued.

    Whether a collective has completed does not matter here: the ranks of `waiting` have lost their peer or hang.
    """
    by_rank = _whole(records)
    found = []
    for group in shared_groups(records):
        counts = {rank: len(issued) for rank, issued in _calls_in(group, by_rank).items()}
        for rank in (rank for rank in group.ranks if rank in ended and rank in counts):
            place = counts[rank] + 1
            there = [other for other in waiting if counts.get(other, 0) >= place]
            if there:
                call = by_rank[there[0]].calls[group.key][place - 1]
                gone = tuple(one for one in group.ranks if one in ended and counts.get(one, place) < place)
                wait = Wait(there[0], group, call, gone)
                lines = tuple(
                    f"rank {other}: {by_rank[other].calls[group.key][place - 1]}"
                    f"{_at(by_rank[other].calls[group.key][place - 1])}"
                    for other in there
                )
                sentence = left_alone_sentence(gone, ended, wait, there)
                found.append((call.order, Finding(FindingKind.LEFT_ALONE, sentence, lines, gone)))
    for one in _waits_for_messages(records):
        gone = tuple(rank for rank in one.missing if rank in ended)
        if gone and one.rank in waiting and (not one.any_of or len(gone) == len(one.missing)):
            sentence = left_alone_sentence(gone, ended, one, [one.rank])
            lines = (f"rank {one.rank}: {one.title}{_at(one.call)}",)
            found.append((one.call.order, Finding(FindingKind.LEFT_ALONE, sentence, lines, gone)))
    return min(found, key=lambda one: one[0])[1] if found else None


def differences(records: Sequence[RankRecord]) -> list[Finding]:
    """Explain ranks that hang: by the first mismatch or, for each group, by the members that lag behind the others.

    Only the *issuing* of a collective counts: gloo records its completion late, or never.
    """
    mismatch = first_mismatch(records)
    if mismatch is not None:
        return [mismatch]
    by_rank = _whole(records)
    found = (_behind(group, _calls_in(group, by_rank)) for group in shared_groups(records))
    return [finding for finding in found if finding is not None]


def _behind(group: SharedGroup, calls: Mapping[int, Sequence[Call]]) -> Finding | None:
    front = max(map(len, calls.values()), default=0)
    there = {rank: issued[-1] for rank, issued in calls.items() if front and len(issued) == front}
    behind = tuple(rank for rank in calls if front and rank not in there)
    if not behind:
        return None
    sentence = f"{list_of(behind)} never reached {next(iter(there.values()))}{_of_group(group)}"
    lines = tuple(f"rank {rank}: {_described(call)}{_at(call)}" for rank, call in there.items())
    return Finding(FindingKind.BEHIND, sentence, lines, behind)


def is_uneven(records: Sequence[RankRecord]) -> bool:
    """Has a rank issued more in a group than another member?"""
    by_rank = {record.rank: record for record in records}
    counts = ({len(issued) for issued in _calls_in(group, by_rank).values()} for group in shared_groups(records))
    return any(len(each) > 1 for each in counts)


def first_uneven(records: Sequence[RankRecord]) -> Finding | None:
    """A collective that some members have issued and others have not, although all ranks have passed.

    Nobody has missed it. Where something has raised, the ranks may have left it out for that.
    """
    if any(_has_raised(record) or not record.is_whole for record in records):
        return None
    by_rank = {record.rank: record for record in records}
    found = []
    for group in shared_groups(records):
        calls = _calls_in(group, by_rank)
        place = min(map(len, calls.values()), default=0) + 1
        there = {rank: issued[place - 1] for rank, issued in calls.items() if len(issued) >= place}
        if there and len(calls) == len(group.ranks):
            gone = tuple(rank for rank in group.ranks if rank not in there)
            first = next(iter(there.values()))
            lines = tuple(f"rank {rank}: {_described(call)}{_at(call)}" for rank, call in there.items())
            sentence = _without(gone, first, group, list(there))
            found.append((first.order, Finding(FindingKind.UNMATCHED, sentence, lines, gone, is_hazard=True)))
    return min(found, key=lambda one: one[0])[1] if found else None


def _has_raised(record: RankRecord) -> bool:
    return record.has_raised or any(call.raised for calls in record.calls.values() for call in calls)


def _without(gone: Sequence[int], call: Call, group: SharedGroup, there: Sequence[int]) -> str:
    verb = "has" if len(there) == 1 else "have"
    return f"{list_of(gone)} passed without {call}{_of_group(group)}, which {list_of(there)} {verb} issued"


# -- only with logs


def first_unmatched(records: Sequence[RankRecord]) -> Finding | None:
    """A call of ranks that have all passed which lacks members or its peer: nobody has missed it."""
    known = {record.rank for record in records if record.is_whole}
    found = []
    for calls in waits(records).values():
        for wait in calls:
            if wait.call.tells_end or wait.call.raised or not known.issuperset(wait.missing):
                continue
            if wait.call.is_p2p:
                verb = "received" if wait.call.kind == "send" else "sent"
                sentence = f"nobody has {verb} the message of rank {wait.rank}'s {wait.title}"
            else:
                there = tuple(rank for rank in wait.group.ranks if rank not in wait.missing)
                sentence = _without(wait.missing, wait.call, wait.group, there)
            lines = (f"rank {wait.rank}: {_described(wait.call)}{_at(wait.call)}",)
            found.append((wait.call.order, Finding(FindingKind.UNMATCHED, sentence, lines, wait.missing)))
    return min(found, key=lambda one: one[0])[1] if found else None


def finding_of_rank(rank: int, note: Mapping[str, Any]) -> Finding:
    """The finding that a rank has written into its log."""
    site = Site(*note["site"]) if note.get("site") else None
    where = f" ({site})" if site else ""
    kind = FindingKind(note["kind"])
    text = f"rank {rank}: {note['text']}"
    return Finding(kind, f"{text}{where}", (f"{text}   {site or ''}".rstrip(),), (rank,))
