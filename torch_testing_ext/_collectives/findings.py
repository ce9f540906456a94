"""Findings: mismatches, deadlocks, ranks left alone; sends and receives that belong together."""

from __future__ import annotations

import enum
import itertools
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from torch_testing_ext._process.words import MOST_LINES, EndWords, few, grouped, list_of, verb_for

from .failure import Site
from .records import OWN, STORE, Call, RankRecord, SharedGroup, ranks_grouped_by, shared_groups, whole_records

# --------------------------------------------------------------------------------------------------------------------
# Sends and receives: which belong together, and which have no partner yet. Only a log of all calls knows them.

Peer = TypeVar("Peer", int, int | None)
# The records of the ranks of a test.
Records = Sequence[RankRecord]
# The calls of each rank in a group, and one call of each.
CallsByRank = Mapping[int, Sequence[Call]]
CallOfRank = Mapping[int, Call]
# The ranks that have ended, and how.
Ended = Mapping[int, str]


@dataclass(frozen=True)
class Pair:
    """A send and the receive that gets its message."""

    group: SharedGroup
    source: int
    target: int
    send: Call
    receive: Call

    @property
    def differs(self) -> bool:
        return self.send.agreement_of_message != self.receive.agreement_of_message


@dataclass(frozen=True)
class Wait:
    """A call of a rank, with the members of its group that have not issued it; of a message, its possible partners."""

    rank: int
    group: SharedGroup
    call: Call
    missing: tuple[int, ...]
    # One of the missing is enough: a receive from any rank, a key of a store, or a signal.
    any_of: bool = False
    # Of a wait at a store: the keys in words, as far as they are known.
    keys: tuple[str, ...] = ()

    @property
    def is_at_store(self) -> bool:
        return self.call.kind == STORE

    @property
    def is_own(self) -> bool:
        return self.call.kind == OWN

    @property
    def cause(self) -> str:
        """The awaited object, if that is no call of others, in words."""
        if self.is_own:
            return "a lock, a queue, an event or a thread of its own"
        if not self.keys:
            return "a key of a store"
        return f"the key{'s' * (len(self.keys) > 1)} {', '.join(self.keys)} of a store"

    @property
    def name(self) -> str:
        """The call as it is named in a sentence; of a message with its peer."""
        if self.is_at_store:
            return f"{self.call.name}({', '.join(self.keys)})"
        if not self.call.is_p2p:
            return self.call.name
        direction = "to" if self.call.kind == "send" else "from"
        peer = "any rank" if self.call.peer is None else f"rank {self.group.ranks[self.call.peer]}"
        tag = f", tag {self.call.tag}" if self.call.tag else ""
        return f"{self.call.kind} #{self.call.place} {direction} {peer}{tag}"

    @property
    def title(self) -> str:
        return " ".join([self.name, *self.call.shapes])


@dataclass
class _Inbox:
    """The messages of one tag to one rank: what was sent, and what is received, by source; None: from any rank."""

    sent: dict[int, list[Call]]
    received: dict[int | None, list[Call]]


def _inboxes(records: Records) -> list[tuple[SharedGroup, int, _Inbox]]:
    """The inboxes of all ranks, with the group of their messages."""
    by_rank = whole_records(records)
    have_all = all(record.has_all_messages for record in records)
    if not have_all or not any(record.messages for record in by_rank.values()):
        return []
    all_inboxes = []
    for group in shared_groups(records):
        # By target and tag.
        inboxes: dict[tuple[int, int], _Inbox] = defaultdict(lambda: _Inbox({}, {}))
        for rank in group.ranks:
            record = by_rank.get(rank)
            messages = () if record is None else record.messages.get(group.key, ())
            for call in messages:
                _put(inboxes, group, rank, call)
        all_inboxes += [(group, target, inbox) for (target, _), inbox in inboxes.items()]
    return all_inboxes


def _put(inboxes: Mapping[tuple[int, int], _Inbox], group: SharedGroup, rank: int, call: Call) -> None:
    """Put a send of a rank into the inbox of its target, and a receive into its own."""
    if call.peer is not None and call.peer >= len(group.ranks):
        return
    peer = None if call.peer is None else group.ranks[call.peer]
    if call.kind == "send" and peer is not None:
        inboxes[peer, call.tag].sent.setdefault(rank, []).append(call)
    else:
        inboxes[rank, call.tag].received.setdefault(peer, []).append(call)


def pairs_of(records: Records) -> list[Pair]:
    """The sends and receives that belong together. Where a rank receives from any, that is not known."""
    pairs = []
    for group, target, inbox in _inboxes(records):
        if None in inbox.received:
            continue
        for source, sent in inbox.sent.items():
            received = inbox.received.get(source, ())
            for send, receive in zip(sent, received, strict=False):
                pairs.append(Pair(group, source, target, send, receive))
    return pairs


def unpaired(records: Records) -> list[Wait]:
    """The sends and receives without a partner. Where a rank receives from any, only their numbers are compared."""
    waits: list[Wait] = []
    for group, target, inbox in _inboxes(records):
        if None in inbox.received:
            waits += _unpaired_by_number(group, target, inbox)
            continue
        sources = {*inbox.sent, *(source for source in inbox.received if source is not None)}
        for source in sources:
            sends = inbox.sent.get(source, [])
            receives = inbox.received.get(source, [])
            waits += [Wait(source, group, call, (target,)) for call in sends[len(receives) :]]
            waits += [Wait(target, group, call, (source,)) for call in receives[len(sends) :]]
    return waits


def _unpaired_by_number(group: SharedGroup, target: int, inbox: _Inbox) -> list[Wait]:
    """The latest sends, or receives, of an inbox that are more than the others."""
    sent = _in_order(inbox.sent)
    received = _in_order(inbox.received)
    others = tuple(rank for rank in group.ranks if rank != target)
    waits = []
    for source, call in sent[len(received) :]:
        waits.append(Wait(source, group, call, (target,)))
    for peer, call in received[len(sent) :]:
        if peer is None:
            waits.append(Wait(target, group, call, others, any_of=True))
        else:
            waits.append(Wait(target, group, call, (peer,)))
    return waits


def _in_order(calls: Mapping[Peer, Sequence[Call]]) -> list[tuple[Peer, Call]]:
    """The calls of all peers, in the order of the calls."""
    pairs = [(peer, call) for peer, of_peer in calls.items() for call in of_peer]
    return sorted(pairs, key=lambda pair: pair[1].order)


# --------------------------------------------------------------------------------------------------------------------
# Findings about collectives: ranks that disagree, ranks in a deadlock, ranks left alone.

_CALLS_BEFORE = 3
_LONGEST_CYCLE = 5
# In which ranks of a mismatch call.
_MOST_WAYS = 4
_WIDEST_COLUMN = 60
# In seconds; a test that sets a shorter one expects the error.
EXPECTED_TIMEOUT = 60.0


class FindingKind(enum.Enum):
    """A kind of fault in the collectives of a test."""

    MISMATCH = "mismatch"
    DEADLOCK = "deadlock"
    LEFT_ALONE = "left alone"
    # Members of a group that hangs have not come to the latest call of the others.
    BEHIND = "behind"
    # A call that lacks its peers, although all ranks have passed.
    UNMATCHED = "unmatched"
    # Opposite orders that happened to pass.
    ORDER = "order"
    # Tensors that ranks must hold alike.
    PARTED = "parted"
    UNWAITED = "unwaited"
    RACE = "race"
    NAN = "nan"
    # The sanitizer itself has failed.
    RECORDER = "recorder"


class Doing(NamedTuple):
    """The call or the fault of one rank, as a line of a finding."""

    rank: int
    did: str
    site: Site | None
    # The ranks for which it waits.
    awaited: tuple[int, ...] = ()
    # The call in which it waits for them.
    call: str = ""

    def __str__(self) -> str:
        return self.line_of([self.rank])

    def line_of(self, ranks: Sequence[int]) -> str:
        """The line for several ranks that did the same."""
        return f"{list_of(ranks)}: {self.did}" + (f"   {self.site}" if self.site else "")


@dataclass(frozen=True)
class Finding:
    """One fault: a sentence for the title, lines with each rank's call, and the rank that is blamed first."""

    kind: FindingKind
    sentence: str
    lines: tuple[str | Doing, ...]
    ranks: tuple[int, ...]
    # Only to be said: the test passes.
    is_hazard: bool = False
    # Ranks that have not come to the call yet.
    awaited: tuple[int, ...] = ()
    # The calls of the ranks until then, side by side.
    table: tuple[str, ...] = ()
    # A shorter sentence, which begins with the ranks that are blamed.
    brief: str = ""

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
        if not self.table:
            return lines
        rows = "\n".join(f"  {row}" for row in self.table)
        return f"{lines}\n\n{rows}"

    def _folded(self) -> list[str]:
        """The lines; of many ranks, those that did the same at one place share one."""
        if len(self.lines) <= MOST_LINES:
            return [str(line) for line in self.lines]
        alike = grouped((line[1:] if isinstance(line, Doing) else line, line) for line in self.lines)
        folded = []
        for lines in alike.values():
            first = lines[0]
            ranks = [line.rank for line in lines if isinstance(line, Doing)]
            folded.append(first.line_of(ranks) if isinstance(first, Doing) else first)
        return folded


class _Candidate(NamedTuple):
    """A finding, and the number of the call that it is about among those of its rank."""

    order: int
    finding: Finding


def _first_of(candidates: Sequence[_Candidate]) -> Finding | None:
    """The finding about the call that was issued first."""
    if not candidates:
        return None
    return min(candidates, key=lambda candidate: candidate.order).finding


def _calls_in(group: SharedGroup, by_rank: Mapping[int, RankRecord]) -> dict[int, Sequence[Call]]:
    """The calls of each member whose record is known."""
    return {rank: by_rank[rank].calls.get(group.key, ()) for rank in group.ranks if rank in by_rank}


def _calls_at(place: int, calls: CallsByRank) -> dict[int, Call]:
    """The call of this number, of each rank that has come to it."""
    return {rank: issued[place - 1] for rank, issued in calls.items() if len(issued) >= place}


def _of_named_group(group: SharedGroup) -> str:
    return "" if group.title == "the default group" else f" of {group.title}"


# -- mismatch


def first_mismatch(records: Records, unless_raised: bool = False) -> Finding | None:
    """The first collective of a group in which members disagree; of several groups, the one that was issued first.

    `unless_raised`: leave out a mismatch after which a collective has raised. The ranks have not failed for that: the
    test expects it.
    """
    by_rank = whole_records(records)
    candidates: list[_Candidate] = []
    for group in shared_groups(records):
        candidate = _first_mismatch_in(group, _calls_in(group, by_rank), unless_raised)
        if candidate is not None:
            candidates.append(candidate)
    for pair in pairs_of(records):
        has_raised = pair.send.raised or pair.receive.raised
        if pair.differs and not (unless_raised and has_raised):
            order = min(pair.send.order, pair.receive.order)
            candidates.append(_Candidate(order, _wrong_pair(pair)))
    return _first_of(candidates)


def _first_mismatch_in(group: SharedGroup, calls: CallsByRank, unless_raised: bool) -> _Candidate | None:
    """The first collective of this group in which members disagree: what comes after it is not looked at."""
    most = max(map(len, calls.values()), default=0)
    # Ranks of a whole world that have done the same share their calls.
    unlike = {rank: calls[rank] for rank in {id(issued): rank for rank, issued in calls.items()}.values()}
    for place in range(1, most + 1):
        calls_there = _calls_at(place, unlike)
        if len(unlike) < len(calls):
            if len(calls_there) == 1 and all(call.exchange is None for call in calls_there.values()):
                continue
            calls_there = _calls_at(place, calls)
        finding = _mismatch_at(group, place, calls_there, calls)
        if finding is None:
            continue
        if unless_raised and any(call.raised for call in calls_there.values()):
            return None
        return _Candidate(min(call.order for call in calls_there.values()), finding)
    return None


def _mismatch_at(group: SharedGroup, place: int, calls_there: CallOfRank, calls: CallsByRank) -> Finding | None:
    """The mismatch among the calls of one place, if there is one."""
    agreements = {call.agreement for call in calls_there.values()}
    if len(agreements) > 1 or _have_other_parts(calls_there):
        return _mismatch(group, place, calls_there, calls)
    if any(call.exchange is not None for call in calls_there.values()):
        return _wrong_exchange(group, place, calls_there)
    return None


def _with_parts(call: Call) -> Call:
    return replace(call, details=(*call.details, " to ".join(call.parts)))


def _mismatch(group: SharedGroup, place: int, calls_there: CallOfRank, calls: CallsByRank) -> Finding:
    """The finding about members that disagree in the calls of one place."""
    if len({(call.inputs, call.agreement) for call in calls_there.values()}) == 1:
        calls_there = {rank: _with_parts(call) for rank, call in calls_there.items()}
    groups = ranks_grouped_by(calls_there, lambda call: (call.kind, call.inputs, call.agreement, call.details))
    rest = [rank for ranks, _ in groups[_MOST_WAYS:] for rank in ranks]
    groups = groups[:_MOST_WAYS]
    parts = []
    for ranks, call in groups:
        parts.append(f"{list_of(ranks)} {verb_for(ranks, 'calls', 'call')} {_described(call)}")
    if rest:
        parts.append(f"{list_of(rest)} call something else")
    where = f"call #{place} of {group.title}"
    brief = ", ".join(parts)
    if len(groups) == 2 and len(calls_there) == len(group.ranks) > 2:
        _, call_of_others = groups[1]
        brief = f"{parts[0]}, the others call {_described(call_of_others)}"
    return Finding(
        FindingKind.MISMATCH,
        f"ranks disagree in {where} ({list_of(group.ranks)}): {', '.join(parts)}",
        _doing(calls_there),
        tuple(groups[0][0]),
        awaited=tuple(rank for rank in group.ranks if rank not in calls_there),
        table=_side_by_side(groups, place, calls) if place > 1 else (),
        brief=f"{brief} in {where}",
    )


def _have_other_parts(calls: CallOfRank) -> bool:
    """Do members put together parts of other shapes or placements, although they have as many elements?"""
    layouts = {call.layout for call in calls.values()} - {()}
    parts = {call.parts for call in calls.values()} - {()}
    return len(layouts) > 1 or len(parts) > 1


def _side_by_side(groups: Sequence[tuple[Sequence[int], Call]], place: int, calls: CallsByRank) -> tuple[str, ...]:
    """The calls that lead to a mismatch, a column for all ranks that agree there, with a mark where they differ."""
    first = max(1, place - _CALLS_BEFORE)
    columns = []
    for ranks, _ in groups:
        calls_of_first = calls[ranks[0]][first - 1 : place]
        texts = [_cut(text) for text in (list_of(ranks), *map(_described, calls_of_first))]
        width = max(map(len, texts))
        columns.append([text.ljust(width) for text in texts])
    titles = ["", *(f"#{number}" for number in range(first, place + 1))]
    rows = zip(titles, *columns, strict=True)
    width_of_titles = max(map(len, titles))
    lines = [f"  {title.rjust(width_of_titles)}  {'  '.join(texts)}".rstrip() for title, *texts in rows]
    return (*lines[:-1], f">{lines[-1][1:]}")


def _cut(text: str) -> str:
    return text if len(text) <= _WIDEST_COLUMN else f"{text[: _WIDEST_COLUMN - 3]}..."


def _wrong_exchange(group: SharedGroup, place: int, calls: CallOfRank) -> Finding | None:
    """The first pair of ranks of which one sends another number of elements than the other expects."""
    exchanges = {rank: call.exchange for rank, call in calls.items() if call.exchange is not None}
    if len({count for exchange in set(exchanges.values()) for counts in exchange for count in counts}) == 1:
        return None
    for (at, sender), (to, receiver) in itertools.product(enumerate(group.ranks), repeat=2):
        if sender not in exchanges or receiver not in exchanges:
            continue
        outgoing, _ = exchanges[sender]
        _, incoming = exchanges[receiver]
        if max(at, to) >= min(len(outgoing), len(incoming)) or outgoing[to] == incoming[at]:
            continue
        where = f"call #{place} of {group.title}"
        what = f"rank {sender} sends {outgoing[to]} elements to rank {receiver}, which expects {incoming[at]}"
        return Finding(
            FindingKind.MISMATCH,
            f"ranks disagree in {where} ({list_of(group.ranks)}): {what}",
            _doing(calls),
            (sender, receiver),
            brief=f"{what}, in {where}",
        )
    return None


def _wrong_pair(pair: Pair) -> Finding:
    """The finding about a message that is received as another one than was sent."""
    sent = " ".join(pair.send.inputs)
    received = " ".join(pair.receive.inputs)
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


def _doing(calls: CallOfRank) -> tuple[Doing, ...]:
    return tuple(Doing(rank, _described(call), call.site) for rank, call in sorted(calls.items()))


def _described(call: Call) -> str:
    return " ".join([call.kind, *call.inputs, *call.details]).rstrip()


# -- waiting


def waiting_calls(records: Records) -> dict[int, list[Wait]]:
    """The collectives of each rank that are not over, in the order of the calls.

    A member of whose collectives nothing is known counts as missing.
    """
    by_rank = whole_records(records)
    all_waits: list[Wait] = []
    for group in shared_groups(records):
        issued = _calls_in(group, by_rank)
        counts = {rank: len(issued.get(rank, ())) for rank in group.ranks}
        least = min(counts.values())
        for rank, calls in issued.items():
            for call in calls:
                if call.is_over:
                    continue
                missing: tuple[int, ...] = ()
                if call.place > least:
                    missing = tuple(member for member, count in counts.items() if count < call.place)
                if missing or call.tells_end:
                    all_waits.append(Wait(rank, group, call, missing))
    all_waits += [wait for wait in unpaired(records) if not wait.call.is_over]
    in_order = sorted(all_waits, key=lambda wait: wait.call.order)
    return grouped((wait.rank, wait) for wait in in_order)


def deadlocked(waiting: Mapping[int, Sequence[Wait]], ended: Ended) -> dict[int, Wait]:
    """The ranks that cannot go on if each waits for one of its collectives, with the one that keeps it from going on.

    `ended`: the ranks that issue nothing any more. A rank may go on as long as one of its collectives lacks no member,
    and is just being executed, or lacks only ranks that may go on.
    """
    left = dict(waiting)
    while True:
        free = []
        for rank, calls in left.items():
            if not all(_never_ends(wait, left, ended) for wait in calls):
                free.append(rank)
        if not free:
            return {rank: calls[-1] for rank, calls in left.items()}
        for rank in free:
            del left[rank]


def _never_ends(wait: Wait, left: Mapping[int, object], ended: Ended) -> bool:
    never = (member in left or member in ended for member in wait.missing)
    return all(never) if wait.any_of else any(never)


def describe_deadlock(deadlocked: Mapping[int, Wait], ended: Ended, suspected: bool = False) -> Finding:
    """The finding about ranks that cannot go on: left alone by a rank that has ended, or in a cycle."""
    lines = tuple(_waiting(rank, wait) for rank, wait in sorted(deadlocked.items()))
    left_alone = _left_alone(deadlocked, ended)
    if left_alone is not None:
        sentence, gone = left_alone
        return Finding(FindingKind.LEFT_ALONE, sentence, lines, gone)
    causes = {rank: wait for rank, wait in deadlocked.items() if wait.is_at_store or wait.is_own}
    if causes:
        return _waits_that_nobody_ends(causes, deadlocked, lines, suspected)
    cycle = _cycle(deadlocked)
    parts: list[str] = []
    for rank, then in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        wait = deadlocked[rank]
        subject = "which" if parts else f"rank {rank}"
        parts.append(f"{subject} waits in {wait.group.title} ({wait.name}, {wait.call.line}) for rank {then}")
    if len(parts) > _LONGEST_CYCLE:
        hidden = len(parts) - _LONGEST_CYCLE
        parts[_LONGEST_CYCLE - 1 : -1] = [f"which waits for {hidden + 1} more ranks"]
    sentence = ", ".join(parts)
    if suspected:
        sentence = f"suspected deadlock: {sentence}"
    return Finding(FindingKind.DEADLOCK, sentence, lines, tuple(cycle))


def _waits_that_nobody_ends(
    causes: Mapping[int, Wait], deadlocked: Mapping[int, Wait], lines: tuple[Doing, ...], suspected: bool
) -> Finding:
    """The finding about ranks that wait for keys of a store, or in themselves: whoever might end that waits, too."""
    sentences = []
    for are_own, why in ((True, "which nothing in the process ends"), (False, "which nobody sets")):
        waits = {rank: wait for rank, wait in causes.items() if wait.is_own == are_own}
        if waits:
            sentences.append(f"{_ranks_that_wait(waits)}, {why}")
    sentence = "; ".join(sentences)
    others = [rank for rank in sorted(deadlocked) if rank not in causes]
    if others:
        calls = list(dict.fromkeys(_call_in_group(deadlocked[rank]) for rank in others))
        sentence += f"; {list_of(others)} {verb_for(others, 'waits', 'wait')} in {', '.join(calls[:_MOST_WAYS])}"
    if suspected:
        sentence = f"suspected deadlock: {sentence}"
    return Finding(FindingKind.DEADLOCK, sentence, lines, tuple(sorted(causes)))


def _ranks_that_wait(waits: Mapping[int, Wait]) -> str:
    """The ranks with these waits, which are all of a kind, for what, and where."""
    alike = grouped(((wait.cause, wait.call.line), rank) for rank, wait in sorted(waits.items()))
    parts = [
        f"{list_of(ranks)} {verb_for(ranks, 'waits', 'wait')} for {cause} ({line})"
        for (cause, line), ranks in alike.items()
    ]
    hidden = len(parts) - _MOST_WAYS
    if hidden > 0:
        parts[_MOST_WAYS:] = [f"{hidden} more wait"]
    return ", ".join(parts)


def _call_in_group(wait: Wait) -> str:
    return f"{wait.name}{_of_named_group(wait.group)}"


def _waiting(rank: int, wait: Wait) -> Doing:
    if wait.is_at_store or wait.is_own:
        return Doing(rank, f"waiting for {wait.cause}", wait.call.site, tuple(wait.missing), wait.name)
    call = _call_in_group(wait)
    return Doing(rank, f"waiting for {list_of(wait.missing)} in {call}", wait.call.site, tuple(wait.missing), call)


def _left_alone(deadlocked: Mapping[int, Wait], ended: Ended) -> tuple[str, tuple[int, ...]] | None:
    for _, wait in sorted(deadlocked.items()):
        gone = () if wait.is_own else tuple(rank for rank in wait.missing if rank in ended)
        if gone:
            waiting = [rank for rank, other in deadlocked.items() if _is_same_call(other, wait)]
            return left_alone_sentence(gone, ended, wait, waiting), gone
    return None


def _is_same_call(first: Wait, second: Wait) -> bool:
    if first.call.is_p2p or second.call.is_p2p:
        # Each message has a place of its own between two ranks.
        return first is second
    return first.group.key == second.group.key and first.call.place == second.call.place


def left_alone_sentence(gone: Sequence[int], ended: Ended, wait: Wait, waiting: Sequence[int]) -> str:
    """Name the ranks that ended without the collective that others wait in."""
    how = ended[gone[0]]
    left = f"{list_of(gone)} {'left' if how == EndWords.PASSED else how}"
    if wait.is_at_store:
        return f"{left} without setting {wait.cause}; {_are_waiting(waiting)} for it"
    if wait.call.is_p2p:
        doing = "receiving" if wait.call.kind == "send" else "sending"
        return f"{left} without {doing}; {_are_waiting(waiting)} in {wait.name}"
    return f"{left} before {_call_in_group(wait)}; {_are_waiting(waiting)} in it"


def _are_waiting(ranks: Collection[int]) -> str:
    return f"{list_of(list(ranks))} {verb_for(ranks, 'is', 'are')} waiting"


def _cycle(deadlocked: Mapping[int, Wait]) -> list[int]:
    """Follow each rank to the first that it waits for until one comes again."""
    path: list[int] = []
    rank = min(deadlocked)
    while rank not in path:
        path.append(rank)
        rank = next(member for member in deadlocked[rank].missing if member in deadlocked)
    return path[path.index(rank) :]


def first_left_alone(records: Records, ended: Ended, waiting: Sequence[int]) -> Finding | None:
    """A rank that ended by itself without a collective that ranks of `waiting` have issued.

    Whether a collective has completed does not matter here: the ranks of `waiting` have lost their peer or hang.
    """
    by_rank = whole_records(records)
    candidates = []
    for group in shared_groups(records):
        calls = _calls_in(group, by_rank)
        for rank in group.ranks:
            if rank in ended and rank in calls:
                place = len(calls[rank]) + 1
                candidates += _left_alone_at(group, place, calls, ended, waiting)
    for wait in unpaired(records):
        gone = tuple(rank for rank in wait.missing if rank in ended)
        is_endless = bool(gone) and (not wait.any_of or len(gone) == len(wait.missing))
        if is_endless and wait.rank in waiting:
            sentence = left_alone_sentence(gone, ended, wait, [wait.rank])
            lines = (Doing(wait.rank, f"in {wait.title}", wait.call.site),)
            candidates.append(_Candidate(wait.call.order, Finding(FindingKind.LEFT_ALONE, sentence, lines, gone)))
    return _first_of(candidates)


def _left_alone_at(
    group: SharedGroup,
    place: int,
    calls: CallsByRank,
    ended: Ended,
    waiting: Sequence[int],
) -> list[_Candidate]:
    """The finding about ranks that have ended before their call of this place, if ranks of `waiting` are in it."""
    calls_there = _calls_at(place, calls)
    issued = {rank: calls_there[rank] for rank in waiting if rank in calls_there}
    if not issued:
        return []
    known = [rank for rank in group.ranks if rank in calls]
    gone = tuple(rank for rank in known if rank in ended and rank not in calls_there)
    first, call = next(iter(issued.items()))
    sentence = left_alone_sentence(gone, ended, Wait(first, group, call, gone), list(issued))
    lines = tuple(Doing(rank, f"in {issue}", issue.site) for rank, issue in issued.items())
    return [_Candidate(call.order, Finding(FindingKind.LEFT_ALONE, sentence, lines, gone))]


def differences(records: Records) -> list[Finding]:
    """Explain ranks that hang: by the first mismatch or, for each group, by the members that lag behind the others.

    Only the *issuing* of a collective counts: gloo records its completion late, or never.
    """
    mismatch = first_mismatch(records)
    if mismatch is not None:
        return [mismatch]
    by_rank = whole_records(records)
    findings = [_behind(group, _calls_in(group, by_rank)) for group in shared_groups(records)]
    return [finding for finding in findings if finding is not None]


def _behind(group: SharedGroup, calls: CallsByRank) -> Finding | None:
    """The finding about members that have not come to the latest call of the others, if there are some."""
    most = max(map(len, calls.values()), default=0)
    if most == 0:
        return None
    in_front = {rank: issued[-1] for rank, issued in calls.items() if len(issued) == most}
    behind = tuple(rank for rank in calls if rank not in in_front)
    if not behind:
        return None
    call = next(iter(in_front.values()))
    sentence = f"{list_of(behind)} never reached {call.name}{_of_named_group(group)}; {_are_waiting(in_front)} in it"
    lines = tuple(Doing(rank, f"in {call}", call.site) for rank, call in in_front.items())
    return Finding(FindingKind.BEHIND, sentence, lines, behind)


def is_uneven(records: Records) -> bool:
    """Has a rank issued more in a group than another member?"""
    by_rank = {record.rank: record for record in records}
    for group in shared_groups(records):
        counts = {len(issued) for issued in _calls_in(group, by_rank).values()}
        if len(counts) > 1:
            return True
    return False


def first_uneven(records: Records, has_raised: bool = False) -> Finding | None:
    """A collective that some members have issued and others have not, although all ranks have passed.

    Nobody has missed it. Where something has raised, the ranks may have left it out for that. `has_raised`: only a
    collective that has raised itself, in a rank that caught the error.
    """
    if any(not record.is_whole for record in records):
        return None
    any_raised = any(record.has_raised for record in records) or any(
        call.raised for record in records for calls in record.calls.values() for call in calls
    )
    if any_raised is not has_raised:
        return None
    by_rank = {record.rank: record for record in records}
    candidates = []
    for group in shared_groups(records):
        calls_of_group = _calls_in(group, by_rank)
        place = min(map(len, calls_of_group.values()), default=0) + 1
        issued = _calls_at(place, calls_of_group)
        caught = [rank for rank, call in issued.items() if call.raised and call.timeout >= EXPECTED_TIMEOUT]
        if not issued or len(calls_of_group) < len(group.ranks) or (has_raised and not caught):
            continue
        gone = tuple(rank for rank in group.ranks if rank not in issued)
        first = next(iter(issued.values()))
        sentence = _left_before(gone, first, group, list(issued))
        if has_raised:
            sentence += f"; {list_of(caught)} caught the error"
        finding = Finding(FindingKind.UNMATCHED, sentence, _doing(issued), gone, is_hazard=True)
        candidates.append(_Candidate(first.order, finding))
    return _first_of(candidates)


def _left_before(gone: Sequence[int], call: Call, group: SharedGroup, issuers: Sequence[int]) -> str:
    return f"{list_of(gone)} left before {call.name}{_of_named_group(group)}, which {list_of(issuers)} issued"


# -- only with logs


def first_unmatched(records: Records, has_raised: bool = False, only_messages: bool = False) -> Finding | None:
    """A call of ranks that have all passed which lacks members or its peer: nobody has missed it.

    `has_raised`: only a call that has raised for that, as a warning. `only_messages`: as a warning, too, and only if
    nothing else has raised, since ranks may leave out a message for that.
    """
    known = {record.rank for record in records if record.is_whole}
    if only_messages and any(record.has_raised for record in records) is not has_raised:
        return None
    candidates = []
    for wait in itertools.chain.from_iterable(waiting_calls(records).values()):
        call = wait.call
        if call.tells_end or call.raised is not has_raised or not known.issuperset(wait.missing):
            continue
        if (has_raised and call.timeout < EXPECTED_TIMEOUT) or (only_messages and not call.is_p2p):
            continue
        sentence = _unmatched(wait)
        if has_raised:
            sentence += f"; {list_of([wait.rank])} caught the error"
        lines = _doing({wait.rank: call})
        is_hazard = has_raised or only_messages
        candidates.append(
            _Candidate(call.order, Finding(FindingKind.UNMATCHED, sentence, lines, wait.missing, is_hazard))
        )
    return _first_of(candidates)


def _unmatched(wait: Wait) -> str:
    """The sentence about a call of ranks that have passed, and its missing members."""
    if wait.call.is_p2p:
        what = "received" if wait.call.kind == "send" else "sent the message for"
        return f"nobody {what} rank {wait.rank}'s {wait.title}"
    issuers = tuple(rank for rank in wait.group.ranks if rank not in wait.missing)
    return _left_before(wait.missing, wait.call, wait.group, issuers)
