"""The header: a few numbers that all ranks exchange before the first averaging of a call, to see that they agree.

It is the first thing that a call sends, and it always has the same size: ranks that do different things meet here, and
not in collectives that do not fit together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

OK, REFUSED, FAILED = 0, 1, 2


class CallHeader(NamedTuple):
    """One rank's view of the call that it is in."""

    step: int = 0  # the compiled step, in the order of their first calls
    call: int = 0
    place: int = 0  # 0: when the call begins; n: before its n-th backward; LEAVING: after it
    new: int = 0  # the number of parameters and optimizers that the call found for the first time
    params: int = 0
    status: int = OK
    checksum: int = 0
    reads: int = 0  # bits: the rank reads what is gathered on request, or asks to verify; may differ
    program: int = 0  # of a captured step


LEAVING = -1


def disagreement(headers: Sequence[Sequence[int]]) -> tuple[str, str] | None:
    """The problem and its remedy, if the ranks' headers differ or if one of them announces an error."""
    ranks = [CallHeader(*numbers) for numbers in headers]
    for rank, header in enumerate(ranks):
        if header.status == REFUSED:
            return f"Rank {rank} refused the step: see its error.", "Fix the step or its arguments on that rank."
        if header.status == FAILED:
            return f"The step raised an error on rank {rank}.", "Let all ranks raise, or none of them."
    first = ranks[0]
    for rank, header in enumerate(ranks[1:], 1):
        found = _difference(first, header, rank)
        if found is not None:
            return found
    return None


def _difference(first: CallHeader, other: CallHeader, rank: int) -> tuple[str, str] | None:
    same_calls = "Call the same steps on every rank, and as many backwards in each of them."
    if first.step != other.step:
        return f"Rank 0 is in compiled step {first.step}, rank {rank} in step {other.step}.", same_calls
    if first.call == other.call and (first.new, first.params) != (other.new, other.params):
        return (
            f"Rank 0 has {first.params} parameters ({first.new} new objects), "
            f"rank {rank} has {other.params} ({other.new}).",
            "Build and change the same model and optimizers on every rank, in the same calls.",
        )
    if (first.call, first.place) != (other.call, other.place):
        places = " and ".join(f"{_place(h)} (rank {r})" for r, h in ((0, first), (rank, other)))
        return f"The ranks ran different numbers of calls or backwards: they are {places}.", same_calls
    if first.program != other.program:
        return (
            f"Rank 0 and rank {rank} run different programs of a captured step.",
            "Let the step take the same branch on every rank, with the same settings and the same gradients on entry; "
            'or drop backend="capture".',
        )
    if first.checksum != other.checksum:
        return (
            f"The parameters of rank {rank} differ from those of rank 0.",
            "Let every update use averaged gradients: those of backward(), of modules and optimizers that the step's "
            "arguments, closure or globals hold. Average others, such as those of torch.autograd.grad, in the step.",
        )
    return None


def _place(header: CallHeader) -> str:
    where = {0: "at the start", LEAVING: "at the end"}.get(header.place, f"in backward {header.place}")
    return f"{where} of call {header.call}"
