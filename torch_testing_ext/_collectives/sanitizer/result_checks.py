"""Results of collectives that their inputs do not give: a check in the parent."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from torch_testing_ext._collectives.findings.finding import Doing, Finding, FindingKind
from torch_testing_ext._collectives.findings.message_pairs import pairs_of
from torch_testing_ext._collectives.records.issued_calls import (
    Call,
    RankRecord,
    shared_groups,
    whole_records,
)
from torch_testing_ext._process.words import list_of

from .files_beside_logs import results_beside
from .result_samples import EXCHANGED, OF_ALL, PIECE, PIECES, REDUCED, REDUCED_PARTS, Part, Result


def results_of(log: Path) -> list[Result]:
    """The results that a rank has left; none if it has not come to the end of its test."""
    with suppress(OSError, EOFError, pickle.UnpicklingError):
        results: list[Result] = pickle.loads(results_beside(log).read_bytes())
        return results
    return []


class _Member(NamedTuple):
    """A member of a group in a call: its rank, the call, and the result."""

    rank: int
    call: Call
    result: Result


def wrong_results(records: Sequence[RankRecord], results: Mapping[int, Sequence[Result]]) -> Iterator[Finding]:
    """Find the results that are not those of the inputs: a buffer was written while the call was running."""
    known = {(rank, result.order): result for rank, of_rank in results.items() for result in of_rank}
    for calls in _calls_of_all(records):
        members = [
            _Member(rank, call, known[rank, call.order]) for rank, call in calls.items() if (rank, call.order) in known
        ]
        if len(members) == len(calls) and not any(member.call.raised for member in members):
            yield from _wrong_result(members)


def _calls_of_all(records: Sequence[RankRecord]) -> Iterator[dict[int, Call]]:
    """The calls that belong together, by rank: those of all members of a group, and messages."""
    by_rank = whole_records(records)
    for group in shared_groups(records):
        if by_rank.keys() >= set(group.ranks):
            issued = [by_rank[rank].calls.get(group.key, ()) for rank in group.ranks]
            for calls in zip(*issued, strict=False):
                yield dict(zip(group.ranks, calls, strict=True))
    for pair in pairs_of(records):
        yield {pair.source: pair.send, pair.target: pair.receive}


def _wrong_result(members: Sequence[_Member]) -> Iterator[Finding]:
    wrong: list[tuple[_Member, str]] = []
    for at, member in enumerate(members):
        how = _difference(at, members)
        if how:
            wrong.append((member, how))
    if not wrong:
        return
    first, how = wrong[0]
    ranks = tuple(member.rank for member, _ in wrong)
    text = f"a buffer of {first.result.name} was written before wait(): {how}"
    sentence = f"{list_of(ranks)}: {text}"
    if first.result.waited_at is not None:
        sentence += f" ({first.result.waited_at})"
    if first.call.site is not None:
        sentence += f", issued at {first.call.site}"
    lines = tuple(Doing(member.rank, f"a buffer was written: {how}", member.result.waited_at) for member, how in wrong)
    yield Finding(FindingKind.RACE, sentence, lines, ranks)


def _difference(at: int, members: Sequence[_Member]) -> str:
    """The first part of a member's output that is not as the inputs of all give it, in words; "" if there is none."""
    member = members[at]
    kind = member.call.kind
    if kind in ("reduce", "gather") and member.result.root != at:
        return ""
    for number, part in enumerate(member.result.outputs):
        sources = _sources(kind, at, number, members)
        if part is None or any(source is None or len(source) != len(part) for source in sources) or not sources:
            continue
        given = [source for source in sources if source is not None]
        how = _compared(part, given, member.result)
        if how:
            return how
    return ""


def _sources(kind: str, at: int, number: int, members: Sequence[_Member]) -> list[Part]:
    """The parts of inputs that make a part of a member's output. Parts that are not known are left out."""
    root = members[at].result.root or 0
    places: list[tuple[int, int]] = []
    everybody = range(len(members))
    if kind in REDUCED:
        places = [(other, number) for other in everybody]
    elif kind in OF_ALL:
        places = [(number, 0)]
    elif kind in REDUCED_PARTS:
        places = [(other, at) for other in everybody]
    elif kind in EXCHANGED:
        places = [(number, at)]
    elif kind == "broadcast":
        places = [(root, number)]
    elif kind == "scatter":
        places = [(root, at)]
    elif kind == "recv":
        places = [(0, number)]
    parts: list[Part] = []
    for other, place in places:
        inputs = members[other].result.inputs if other < len(members) else ()
        parts.append(inputs[place] if place < len(inputs) else None)
    return parts


def _compared(part: bytes, sources: Sequence[bytes], result: Result) -> str:
    """Describe the first element of an output that its inputs do not give; "" if there is none."""
    dtype: torch.dtype = getattr(torch, result.dtype)
    if len(sources) == 1 and result.op is None:
        if part == sources[0]:
            return ""
        found, wanted = _numbers(part, dtype), _numbers(sources[0], dtype)
        differ = found.view(torch.uint8).view(len(found), -1) != wanted.view(torch.uint8).view(len(wanted), -1)
        is_wrong = differ.any(1)
    else:
        found = _numbers(part, dtype)
        reduced = _reduced([_numbers(source, dtype) for source in sources], result.op or "")
        if reduced is None:
            return ""
        wanted, most = reduced
        is_wrong = (found.to(wanted.dtype) - wanted).abs() > most
        if dtype.is_floating_point or dtype.is_complex:
            is_wrong &= torch.isfinite(found)
    numbers = is_wrong.nonzero()
    if not len(numbers):
        return ""
    number = int(numbers[0])
    where = f"element {number}" if len(part) < PIECES * PIECE else "an element"
    return f"{where} is {found[number].item()}, the inputs give {wanted[number].item()}"


def _numbers(part: bytes, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(part), dtype=dtype)


def _reduced(inputs: Sequence[torch.Tensor], op: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The reduction of inputs, and how much a result may differ from it; None if that is not known here."""
    dtype = inputs[0].dtype
    if dtype.is_complex or dtype in (torch.bool, torch.uint64):
        return None
    if not dtype.is_floating_point:
        return _reduced_numbers(torch.stack([tensor.to(torch.int64) for tensor in inputs]), op, dtype)
    stacked = torch.stack([tensor.to(torch.float64) for tensor in inputs])
    info = torch.finfo(dtype)
    match op:
        case "sum":
            wanted, scale = stacked.sum(0), stacked.abs().sum(0)
        case "product":
            wanted = stacked.prod(0)
            # A product that is too small on the way is not compared.
            is_small = stacked.abs().clamp(max=1).prod(0) < info.tiny
            scale = torch.where(is_small, torch.inf, wanted.abs())
        case "min":
            wanted, scale = stacked.amin(0), torch.zeros(())
        case "max":
            wanted, scale = stacked.amax(0), torch.zeros(())
        case _:
            return None
    most = 2 * len(inputs) * (info.eps * scale + info.tiny)
    # What overflows, or is not finite, is not compared.
    most = torch.where(torch.isfinite(wanted) & (wanted.abs() < info.max / 2), most, torch.inf)
    return wanted, most


def _reduced_numbers(stacked: torch.Tensor, op: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The reduction of whole numbers, which has one result."""
    match op:
        case "sum":
            wanted = stacked.sum(0)
        case "product":
            wanted = stacked.prod(0)
        case "min":
            wanted = stacked.amin(0)
        case "max":
            wanted = stacked.amax(0)
        case _:
            return None
    # It wraps around as the type does.
    return wanted.to(dtype).to(torch.int64), torch.zeros((), dtype=torch.int64)
