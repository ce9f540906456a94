"""Ranks that disagree in a collective or a message."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

from torch_testing_ext._collectives.records.issued_calls import (
    Call,
    SharedGroup,
    ranks_grouped_by,
    shared_groups,
    whole_records,
)
from torch_testing_ext._process.logs import cut, width
from torch_testing_ext._process.words import list_of, verb_for

from .finding import (
    MOST_WAYS,
    CallOfRank,
    CallsByRank,
    Candidate,
    Doing,
    Finding,
    FindingKind,
    calls_at,
    calls_in,
    described,
    doings_of,
    first_of,
)
from .message_pairs import Pair, Records, pairs_of

_CALLS_BEFORE = 3
_WIDEST_COLUMN = 60
# The columns of a title for what ranks have called.
_MOST_OF_TITLE = 170
# A number with its name, a shape, or another word.
_WORD = re.compile(r"\w+ \d+|\[[^]]*\]|\S+")
_AGREEMENT, _ROOT, _PUT_TOGETHER = attrgetter("agreement"), attrgetter("root"), attrgetter("layout", "parts")
# What may tell calls apart. Sizes come last: those of an exchange differ in sound programs.
_PROPERTIES = (attrgetter("kind"), _AGREEMENT, _ROOT, _PUT_TOGETHER)
# Members may put together parts of other shapes or placements that have as many elements.
_MUST_BE_ALIKE = (_AGREEMENT, _ROOT, attrgetter("layout"), attrgetter("parts"))
# Of calls that C++ has issued, the root is not known; flat parts have no layout.
_UNKNOWN = {None, ()}


def first_mismatch(records: Records, unless_raised: bool = False) -> Finding | None:
    """The first collective of a group in which members disagree; of several groups, the one that was issued first.

    `unless_raised`: leave out a mismatch after which a collective has raised. The ranks have not failed for that: the
    test expects it.
    """
    by_rank = whole_records(records)
    candidates: list[Candidate] = []
    for group in shared_groups(records):
        candidate = _first_mismatch_in(group, calls_in(group, by_rank), unless_raised)
        if candidate is not None:
            candidates.append(candidate)
    for pair in pairs_of(records):
        has_raised = pair.send.raised or pair.receive.raised
        if pair.differs and not (unless_raised and has_raised):
            order = min(pair.send.order, pair.receive.order)
            candidates.append(Candidate(order, _wrong_pair(pair)))
    return first_of(candidates)


def _first_mismatch_in(group: SharedGroup, calls: CallsByRank, unless_raised: bool) -> Candidate | None:
    """The first collective of this group in which members disagree: what comes after it is not looked at."""
    most = max(map(len, calls.values()), default=0)
    # Ranks of a whole world that have done the same share their calls.
    unlike = {rank: calls[rank] for rank in {id(issued): rank for rank, issued in calls.items()}.values()}
    for place in range(1, most + 1):
        calls_there = calls_at(place, unlike)
        if len(unlike) < len(calls):
            if len(calls_there) == 1 and all(call.exchange is None for call in calls_there.values()):
                continue
            calls_there = calls_at(place, calls)
        finding = _mismatch_at(group, place, calls_there, calls)
        if finding is None:
            continue
        if unless_raised and any(call.raised for call in calls_there.values()):
            return None
        return Candidate(min(call.order for call in calls_there.values()), finding)
    return None


def _mismatch_at(group: SharedGroup, place: int, calls_there: CallOfRank, calls: CallsByRank) -> Finding | None:
    """The mismatch among the calls of one place, if there is one."""
    if any(len({*map(each, calls_there.values())} - _UNKNOWN) > 1 for each in _MUST_BE_ALIKE):
        return _mismatch(group, place, calls_there, calls)
    if any(call.exchange is not None for call in calls_there.values()):
        return _wrong_exchange(group, place, calls_there)
    return None


class _Way(NamedTuple):
    """A way in which ranks have called, with what their calls have in common, in words."""

    ranks: list[int]
    words: str


def _ways(calls: CallOfRank) -> list[_Way]:
    """The ways in which ranks have called, by the first property that tells them apart; that of the fewest first."""
    tells_apart = next(each for each in _PROPERTIES if len(set(map(each, calls.values()))) > 1)
    groups = ranks_grouped_by(calls, tells_apart)
    if tells_apart in (_ROOT, _PUT_TOGETHER):
        calls = {rank: _with_detail(call, tells_apart is _ROOT) for rank, call in calls.items()}
    alike = [[calls[rank] for rank in ranks] for ranks, _ in groups]
    words = list(map(_in_common, alike))
    if len(set(words)) < len(words):
        words = [f"{text} {_elements_of(first)}" for text, (first, *_) in zip(words, alike, strict=True)]
    return [_Way(ranks, text) for (ranks, _), text in zip(groups, words, strict=True)]


def _with_detail(call: Call, of_root: bool) -> Call:
    """The call with its root, or its parts, in words, which a log may have among its details."""
    root = "" if call.root is None else f"root {call.root}"
    words = root if of_root else " to ".join(call.parts)
    return call if words in ("", *call.details) else replace(call, details=(*call.details, words))


def _in_common(calls: Sequence[Call]) -> str:
    """The words that describe all of these calls: of inputs of other shapes, their types."""
    first = calls[0]
    texts = set(map(described, calls))
    if len(texts) == 1:
        return texts.pop()
    details = tuple(detail for detail in first.details if all(detail in call.details for call in calls))
    if len({call.inputs for call in calls}) == 1:
        return described(replace(first, details=details))
    types = {input.rpartition(" ")[2] for call in calls for input in call.inputs}
    inputs = ("of", *types) if len(types) == 1 and "]" not in "".join(types) else ()
    return " ".join([first.kind, *inputs, *details])


def _elements_of(call: Call) -> str:
    """The sizes and types that a call must have in common with others, where its inputs do not show them."""
    sizes, types = call.agreement[1:3]
    named = [name for name in types if isinstance(name, str)]
    return f"(elements {list(sizes)}, {', '.join(named).lower()})" if sizes else f"({', '.join(named).lower()})"


def _mismatch(group: SharedGroup, place: int, calls_there: CallOfRank, calls: CallsByRank) -> Finding:
    """The finding about members that disagree in the calls of one place."""
    ways = _ways(calls_there)
    rest = [rank for way in ways[MOST_WAYS:] for rank in way.ranks]
    ways = ways[:MOST_WAYS]
    where = f"call #{place} of {group.title}"
    short = _told_apart([way.words for way in ways])
    # So short that the title has room for where it is.
    most = _MOST_OF_TITLE // len(ways)
    brief_ways = [
        way if width(way.words) <= most else way._replace(words=cut(short.get(way.words, way.words), most))
        for way in ways
    ]
    brief = ", ".join(_calls_in_words(brief_ways, rest))
    if len(ways) == 2 and len(calls_there) == len(group.ranks) > 2:
        brief = f"{_calls_in_words(brief_ways[:1], [])[0]}, the others call {brief_ways[1].words}"
    words_of = {rank: way.words for way in ways for rank in way.ranks}
    doings = tuple(
        Doing(rank, words := words_of.get(rank) or described(call), call.site, short=short.get(words, ""))
        for rank, call in sorted(calls_there.items())
    )
    return Finding(
        FindingKind.MISMATCH,
        f"ranks disagree in {where} ({list_of(group.ranks)}): {', '.join(_calls_in_words(ways, rest))}",
        doings,
        tuple(ways[0].ranks),
        awaited=tuple(rank for rank in group.ranks if rank not in calls_there),
        table=_side_by_side(ways, place, calls) if place > 1 else (),
        brief=f"{brief} in {where}",
    )


def _told_apart(texts: Sequence[str]) -> dict[str, str]:
    """For each of these texts, one without the words that all have in common behind the operation."""
    words = [_WORD.findall(text) for text in texts]
    alike = len([*itertools.takewhile(lambda each: len({*each}) == 1, zip(*words, strict=False))])
    if alike <= 1:
        return {}
    return {text: " ".join([own[0], "...", *own[alike:]]) for text, own in zip(texts, words, strict=True)}


def _calls_in_words(ways: Sequence[_Way], rest: Sequence[int]) -> list[str]:
    """A part of a sentence for each way to call, and one for the ranks that have called in yet other ways."""
    parts = [f"{list_of(ranks)} {verb_for(ranks, 'calls', 'call')} {words}" for ranks, words in ways]
    return [*parts, f"{list_of(rest)} call something else"] if rest else parts


def _side_by_side(ways: Sequence[_Way], place: int, calls: CallsByRank) -> tuple[str, ...]:
    """The calls that lead to a mismatch, a column for all ranks that agree there, with a mark where they differ."""
    first = max(1, place - _CALLS_BEFORE)
    columns = []
    for ranks, words in ways:
        before = [_in_common([calls[rank][number - 1] for rank in ranks]) for number in range(first, place)]
        texts = [cut(text, _WIDEST_COLUMN) for text in (list_of(ranks), *before, words)]
        width = max(map(len, texts))
        columns.append([text.ljust(width) for text in texts])
    titles = ["", *(f"#{number}" for number in range(first, place + 1))]
    rows = zip(titles, *columns, strict=True)
    width_of_titles = max(map(len, titles))
    lines = [f"  {title.rjust(width_of_titles)}  {'  '.join(texts)}".rstrip() for title, *texts in rows]
    return (*lines[:-1], f">{lines[-1][1:]}")


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
            doings_of(calls),
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
