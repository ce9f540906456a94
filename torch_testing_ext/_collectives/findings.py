"""Findings about collectives: ranks that disagree, ranks in a deadlock, ranks left alone."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from .pairs import Pair, Wait, pairs_of, unpaired
from .records import MOST_LINES, Call, RankRecord, SharedGroup, Site, alike, few, grouped, list_of, shared_groups, whole

STORE = "get"  # the kind of a wait at a store
_CALLS_BEFORE = 3
_LONGEST_CYCLE = 5
_MOST_WAYS = 4  # in which ranks of a mismatch call
_WIDEST_COLUMN = 60
_EXPECTED_TIMEOUT = 60.0  # seconds; a test that sets a shorter one expects the error


class FindingKind(enum.Enum):
    """A kind of fault in the collectives of a test."""

    MISMATCH = "mismatch"
    DEADLOCK = "deadlock"
    LEFT_ALONE = "left alone"
    BEHIND = "behind"  # members of a group that hangs have not come to the latest call of the others
    UNMATCHED = "unmatched"  # a call that lacks its peers, although all ranks have passed
    ORDER = "order"  # opposite orders that happened to pass
    PARTED = "parted"  # tensors that ranks must hold alike
    UNWAITED = "unwaited"
    RACE = "race"
    NAN = "nan"
    RECORDER = "recorder"  # the sanitizer itself has failed


class Doing(NamedTuple):
    """The call or the fault of one rank, as a line of a finding."""

    rank: int
    did: str
    site: Site | None
    awaited: tuple[int, ...] = ()  # the ranks for which it waits
    call: str = ""  # in which it waits for them

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.did}" + (f"   {self.site}" if self.site else "")


@dataclass(frozen=True)
class Finding:
    """One fault: a sentence for the title, lines with each rank's call, and the rank that is blamed first."""

    kind: FindingKind
    sentence: str
    lines: tuple[str | Doing, ...]
    ranks: tuple[int, ...]
    is_hazard: bool = False  # only to be said: the test passes
    awaited: tuple[int, ...] = ()  # ranks that have not come to the call yet
    table: tuple[str, ...] = ()  # what the ranks called until then, side by side
    brief: str = ""  # a shorter sentence, which begins with the ranks that are blamed

    @property
    def title(self) -> str:
        return self.brief or self.sentence

    @property
    def sites(self) -> list[Site]:
        """The lines of the program that it is about."""
        return [line.site for line in self.lines if isinstance(line, Doing) and line.site is not None]

    @property
    def gravity(self) -> int:
        """Of several findings, the one with the smallest number decides."""
        return len(FindingKind) - list(FindingKind).index(self.kind)

    @property
    def text(self) -> str:
        return f"=> {self.sentence}\n{self.calls}"

    @property
    def calls(self) -> str:
        lines = "\n".join(f"  {line}" for line in few(self._folded()))
        return "\n".join([f"{lines}\n", *(f"  {row}" for row in self.table)]) if self.table else lines

    def _folded(self) -> list[str]:
        """The lines; of many ranks, those that did the same at one place share one."""
        are_many = len(self.lines) > MOST_LINES
        alike = grouped((line[1:] if are_many and isinstance(line, Doing) else line, line) for line in self.lines)
        found = []
        for first, *others in alike.values():
            text = str(first)
            if others and isinstance(first, Doing):
                ranks = list_of([first.rank, *(one.rank for one in others if isinstance(one, Doing))])
                text = text.replace(f"rank {first.rank}", ranks, 1)
            found.append(text)
        return found


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
    by_rank = whole(records)
    found: list[tuple[int, Finding]] = []
    for group in shared_groups(records):
        calls = _calls_in(group, by_rank)
        for place in range(1, max(map(len, calls.values()), default=0) + 1):
            here = {rank: issued[place - 1] for rank, issued in calls.items() if len(issued) >= place}
            finding = None
            if len({call.agreement for call in here.values()}) > 1 or _have_other_parts(here):
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
    if len({(call.inputs, call.agreement) for call in here.values()}) == 1:
        here = {rank: replace(call, details=(*call.details, " to ".join(call.parts))) for rank, call in here.items()}
    groups = alike(here, lambda call: (call.kind, call.inputs, call.agreement, call.details))
    rest = [rank for ranks, _ in groups[_MOST_WAYS:] for rank in ranks]
    groups = groups[:_MOST_WAYS]
    parts = [f"{list_of(ranks)} {'calls' if len(ranks) == 1 else 'call'} {_described(call)}" for ranks, call in groups]
    parts += [f"{list_of(rest)} call others"] if rest else []
    where = f"call #{place} of {group.title}"
    others = "the others call" if len(here) == len(group.ranks) > 2 == len(groups) else ""
    short = [parts[0], f"{others} {_described(groups[1][1])}"] if others else parts
    return Finding(
        FindingKind.MISMATCH,
        f"ranks disagree in {where} ({list_of(group.ranks)}): {', '.join(parts)}",
        _doing(here),
        tuple(groups[0][0]),
        awaited=tuple(rank for rank in group.ranks if rank not in here),
        table=_side_by_side(groups, place, calls) if place > 1 else (),
        brief=f"{', '.join(short)} in {where}",
    )


def _have_other_parts(here: Mapping[int, Call]) -> bool:
    """Do members put together parts of other shapes or placements, although they have as many elements?"""
    return any(len({getattr(call, name) for call in here.values()} - {()}) > 1 for name in ("layout", "parts"))


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
                what = f"rank {sender} sends {outgoing[0][to]} elements to rank {receiver}, which expects"
                what, where = f"{what} {incoming[1][at]}", f"call #{place} of {group.title}"
                return Finding(
                    FindingKind.MISMATCH,
                    f"ranks disagree in {where} ({list_of(group.ranks)}): {what}",
                    _doing(here),
                    (sender, receiver),
                    brief=f"{what}, in {where}",
                )
    return None


def _wrong_pair(pair: Pair) -> Finding:
    sent, received = (" ".join(call.inputs) for call in (pair.send, pair.receive))
    where = f"message #{pair.send.place} of {pair.group.title}"
    what = f"rank {pair.source} sends {sent} to rank {pair.target}, which receives {received}"
    return Finding(
        FindingKind.MISMATCH,
        f"ranks disagree in {where}: {what}",
        (
            Doing(pair.source, f"send {sent} to rank {pair.target}", pair.send.site),
            Doing(pair.target, f"recv {received} from rank {pair.source}", pair.receive.site),
        ),
        (pair.source, pair.target),
        brief=f"{what}, in {where}",
    )


def _doing(calls: Mapping[int, Call]) -> tuple[Doing, ...]:
    return tuple(Doing(rank, _described(call), call.site) for rank, call in sorted(calls.items()))


def _described(call: Call) -> str:
    return " ".join([call.kind, *call.inputs, *call.details]).rstrip()


# -- waiting


def waits(records: Sequence[RankRecord]) -> dict[int, list[Wait]]:
    """The collectives of each rank that are not over, in the order of the calls.

    A member of whose collectives nothing is known counts as missing.
    """
    by_rank = whole(records)
    found: list[Wait] = []
    for group in shared_groups(records):
        issued = _calls_in(group, by_rank)
        for rank, calls in issued.items():
            for call in calls:
                missing = tuple(other for other in group.ranks if len(issued.get(other, ())) < call.place)
                if not call.is_over and (missing or call.tells_end):
                    found.append(Wait(rank, group, call, missing))
    found += [wait for wait in unpaired(records) if not wait.call.is_over]
    in_order = sorted(found, key=lambda wait: wait.call.order)
    return grouped((wait.rank, wait) for wait in in_order)


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
    lines = tuple(_waiting(rank, wait) for rank, wait in sorted(deadlocked.items()))
    left = _left_alone(deadlocked, ended)
    if left is not None:
        return Finding(FindingKind.LEFT_ALONE, left[0], lines, left[1])
    cycle = _cycle(deadlocked)
    parts = []
    for at, rank in enumerate(cycle):
        wait, then = deadlocked[rank], cycle[(at + 1) % len(cycle)]
        subject = f"rank {rank}" if at == 0 else "which"
        parts.append(f"{subject} waits in {wait.group.title} ({wait.name}, {wait.call.line}) for rank {then}")
    if len(parts) > _LONGEST_CYCLE:
        hidden = len(parts) - _LONGEST_CYCLE
        parts[_LONGEST_CYCLE - 1 : -1] = [f"which waits for {hidden + 1} more in turn"]
    sentence = ", ".join(parts)
    return Finding(FindingKind.DEADLOCK, f"suspected: {sentence}" if suspected else sentence, lines, tuple(cycle))


def _waiting(rank: int, wait: Wait) -> Doing:
    call = f"{wait.name}{_of_group(wait.group)}"
    return Doing(rank, f"waiting for {list_of(wait.missing)} in {call}", wait.call.site, tuple(wait.missing), call)


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
    if wait.call.kind == STORE:
        return f"{list_of(gone)} {how} without setting the key of a store for which {list_of(waiting)} {verb}"
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
    by_rank = whole(records)
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
                issued = {other: by_rank[other].calls[group.key][place - 1] for other in there}
                lines = tuple(Doing(other, f"in {one}", one.site) for other, one in issued.items())
                sentence = left_alone_sentence(gone, ended, wait, there)
                found.append((call.order, Finding(FindingKind.LEFT_ALONE, sentence, lines, gone)))
    for one in unpaired(records):
        gone = tuple(rank for rank in one.missing if rank in ended)
        if gone and one.rank in waiting and (not one.any_of or len(gone) == len(one.missing)):
            sentence = left_alone_sentence(gone, ended, one, [one.rank])
            lines = (Doing(one.rank, f"in {one.title}", one.call.site),)
            found.append((one.call.order, Finding(FindingKind.LEFT_ALONE, sentence, lines, gone)))
    return min(found, key=lambda one: one[0])[1] if found else None


def differences(records: Sequence[RankRecord]) -> list[Finding]:
    """Explain ranks that hang: by the first mismatch or, for each group, by the members that lag behind the others.

    Only the *issuing* of a collective counts: gloo records its completion late, or never.
    """
    mismatch = first_mismatch(records)
    if mismatch is not None:
        return [mismatch]
    by_rank = whole(records)
    found = (_behind(group, _calls_in(group, by_rank)) for group in shared_groups(records))
    return [finding for finding in found if finding is not None]


def _behind(group: SharedGroup, calls: Mapping[int, Sequence[Call]]) -> Finding | None:
    front = max(map(len, calls.values()), default=0)
    there = {rank: issued[-1] for rank, issued in calls.items() if front and len(issued) == front}
    behind = tuple(rank for rank in calls if front and rank not in there)
    if not behind:
        return None
    sentence = f"{list_of(behind)} never reached {next(iter(there.values()))}{_of_group(group)}"
    sentence += f", in which {list_of(list(there))} {'waits' if len(there) == 1 else 'wait'}"
    lines = tuple(Doing(rank, f"in {call}", call.site) for rank, call in there.items())
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
    calls_of_all = (call for record in records for calls in record.calls.values() for call in calls)
    if any(one.has_raised or not one.is_whole for one in records) or any(call.raised for call in calls_of_all):
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
            sentence = _without(gone, first, group, list(there))
            found.append((first.order, Finding(FindingKind.UNMATCHED, sentence, _doing(there), gone, is_hazard=True)))
    return min(found, key=lambda one: one[0])[1] if found else None


def _without(gone: Sequence[int], call: Call, group: SharedGroup, there: Sequence[int]) -> str:
    verb = "has" if len(there) == 1 else "have"
    return f"{list_of(gone)} passed without {call}{_of_group(group)}, which {list_of(there)} {verb} issued"


# -- only with logs


def first_unmatched(records: Sequence[RankRecord], has_raised: bool = False) -> Finding | None:
    """A call of ranks that have all passed which lacks members or its peer: nobody has missed it.

    `has_raised`: only a call that has raised for that, as a warning.
    """
    known = {record.rank for record in records if record.is_whole}
    found = []
    for calls in waits(records).values():
        for wait in calls:
            if wait.call.tells_end or wait.call.raised is not has_raised or not known.issuperset(wait.missing):
                continue
            if has_raised and wait.call.timeout < _EXPECTED_TIMEOUT:
                continue
            if wait.call.is_p2p:
                verb = "received" if wait.call.kind == "send" else "sent"
                sentence = f"nobody has {verb} the message of rank {wait.rank}'s {wait.title}"
            else:
                there = tuple(rank for rank in wait.group.ranks if rank not in wait.missing)
                sentence = _without(wait.missing, wait.call, wait.group, there)
            sentence += f"; {list_of([wait.rank])} has caught the error" if has_raised else ""
            lines = _doing({wait.rank: wait.call})
            finding = Finding(FindingKind.UNMATCHED, sentence, lines, wait.missing, is_hazard=has_raised)
            found.append((wait.call.order, finding))
    return min(found, key=lambda one: one[0])[1] if found else None


def finding_of_rank(rank: int, note: Mapping[str, Any]) -> Finding:
    """The finding that a rank has written into its log."""
    site = Site(*note["site"]) if note.get("site") else None
    issued = Site(*note["issued"]) if note.get("issued") else None
    where = f" ({site})" if site else ""
    where += f", issued at {issued}" if issued else ""
    kind = FindingKind(note["kind"])
    return Finding(kind, f"rank {rank}: {note['text']}{where}", (Doing(rank, note["text"], site),), (rank,))
