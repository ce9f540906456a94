"""The place where ranks compare their headers: once per call, and before a backward that they have not planned.

A header is a few numbers, always as many: ranks that do different things meet here, and not in collectives that do not
fit together. A step whose gradients are planned sends a hash of its header with the first bucket, which costs nothing;
others send the header before anything else. If hashes differ, all ranks send their headers, and know why.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from torch_testing_ext._utils.rank_traces import mark

from ..spmd_errors import SPMDError
from .gradient_buckets import BackwardPlan
from .wire import Wire

_AFTER = 1000  # the places of backwards that run after a call


class CallHeader(NamedTuple):
    """One rank's view of the call that it is in."""

    step: int = 0  # the compiled step, in the order of their first calls
    call: int = 0
    place: int = 0  # 0: when the call begins; n: before its n-th backward; LEAVING: after it
    new: int = 0  # the number of parameters and optimizers that the call found for the first time
    params: int = 0
    refused: int = 0
    checksum: int = 0
    reads: int = 0  # bits: the rank reads what is gathered on request, or asks to verify; may differ
    program: int = 0  # of a captured step


LEAVING = -1


def disagreement(headers: Sequence[Sequence[int]]) -> tuple[str, str] | None:
    """The problem and its remedy, if the ranks' headers differ or if one of them announces an error."""
    ranks = [CallHeader(*numbers) for numbers in headers]
    for rank, header in enumerate(ranks):
        if header.refused:
            return f"Rank {rank} refused the step: see its error.", "Fix the step or its arguments on that rank."
    first = ranks[0]
    for rank, header in enumerate(ranks[1:], 1):
        found = _difference(first, header, rank)
        if found is not None:
            return found
    return None


def _no_checksum() -> None:
    return None


def _difference(first: CallHeader, other: CallHeader, rank: int) -> tuple[str, str] | None:
    """The first difference between the headers of rank 0 and another rank, with its remedy."""
    same_calls = "Call the same steps on every rank, and as many backwards in each of them."
    if first.step != other.step:
        return f"Rank 0 is in compiled step {first.step}, rank {rank} in step {other.step}.", same_calls
    if (first.call, first.place, other.place) == (other.call, LEAVING, LEAVING) and first.params != other.params:
        return (
            f"Optimizers updated rows of {first.params} parameters on rank 0, and of {other.params} on rank {rank}.",
            "Let them step on every rank, or on none.",
        )
    leaves = LEAVING in (first.place, other.place)
    if first.call == other.call and not leaves and (first.new, first.params) != (other.new, other.params):
        return (
            f"Rank 0 has {first.params} parameters ({first.new} new objects), "
            f"rank {rank} has {other.params} ({other.new}).",
            "Build and change the same model and optimizers on every rank, in the same calls.",
        )
    if (first.call, first.place) != (other.call, other.place):
        where = {0: "at the start", LEAVING: "at the end"}
        places = " and ".join(
            f"{where.get(h.place, f'in backward {h.place}')} of call {h.call} (rank {r})"
            for r, h in ((0, first), (rank, other))
        )
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


class MeetingPoint:
    """Exchanges headers with the other ranks."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.device = torch.device("cpu")
        self.header = CallHeader()
        self.plan: BackwardPlan | None = None  # whose first bucket opens the call
        self.reads = 0  # of any rank, as told by the last headers
        self._checksum: Callable[[], torch.Tensor | None] = _no_checksum
        self._pending: Callable[[], list[list[int]]] | None = None  # waits for the headers that are on their way
        self._has_met = False

    def begin(
        self,
        header: CallHeader,
        device: torch.device,
        checksum: Callable[[], torch.Tensor | None],
        plan: BackwardPlan | None,
    ) -> None:
        """Begin a call: its first meeting is due."""
        self.header, self.device, self._checksum, self.plan = header, device, checksum, plan
        self._pending, self._has_met = None, False

    def meet(self, checksum: bool = True) -> None:
        """Meet now, if this call has not."""
        if self._has_met or self.wire.world == 1:
            self.check()
            return
        if not checksum:
            self._checksum = _no_checksum
        self._stamp()
        self._contact()

    def arrive(self) -> None:
        """Send this rank's header, if the call has not yet and will not with a bucket, and do not wait."""
        if not self._has_met and self.plan is None and self.wire.world > 1:
            self._stamp()
            self._send()

    def hash(self, place: int, phase: str) -> int:
        """The hash of this rank's header, to be sent with the first bucket of a backward."""
        if not self._has_met:
            self._stamp()
        self.header = self.header._replace(place=_place(place, phase), reads=0)
        return hash(self.header)

    def settle(self, reads: bool, updated: int) -> bool:
        """Meet at a read of what is not gathered, or at the end of a call. Returns whether any rank reads.

        `updated` parameters have newer rows; it must be the same number on all ranks.
        """
        kept = self.header
        self.header = kept._replace(place=LEAVING, reads=int(reads), params=updated)
        self._send()
        self.check()
        self.header = kept
        return bool(self.reads)

    def check(self, error: str | None = None) -> None:
        """Wait for the headers that are on their way, and compare them. `error`: why this rank refuses the call."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._compare(pending(), error)

    def explain(self, error: str | None = None) -> None:
        """Exchange headers, because hashes differ, and raise an error that names the difference."""
        self._send()
        self.check(error)
        raise SPMDError(
            "The ranks are in different places of a step.",
            remedy="Call the same steps in the same order on every rank.",
        )

    def refuse(self, error: BaseException) -> None:
        """Tell the other ranks, when they meet, that this rank does not take part in the call."""
        if self.wire.world == 1 or self._has_met:
            return
        self._has_met = True
        self.header = self.header._replace(refused=True)
        try:
            self._contact(f"{type(error).__name__}: {error}")
        except SPMDError:
            return  # the caller raises its own

    def confirm(self, place: int, params: int, phase: str, together: bool) -> None:
        """Meet before a backward that is not planned, or, `together`, after one that differed from its plan."""
        self.header = self.header._replace(place=_place(place, phase), params=params)
        if together:
            self._send()
            self.check()
        else:
            self._contact()

    def _stamp(self) -> None:
        """Add the checksum to the header, once per call."""
        self._has_met = True
        checksum = self._checksum()
        if checksum is not None:
            self.header = self.header._replace(checksum=int(checksum))

    def _contact(self, error: str | None = None) -> None:
        """Meet the other ranks wherever they are: at the start of a call, or in its first bucket."""
        if self.plan is None:
            self._send()
            self.check(error)
            return
        first, *others = self.plan.buckets
        first.start_empty(self.wire, hash(self.header))
        first.wait()
        if first.hashes_agree(self.wire.world) and error is None:
            return
        for bucket in others:  # the other ranks look at the hash when all buckets have arrived
            bucket.start_empty(self.wire, 0)
        for bucket in others:
            bucket.wait()
        self.explain(error)

    def _compare(self, rows: list[list[int]], error: str | None) -> None:
        self.reads = functools.reduce(operator.or_, (CallHeader(*row).reads for row in rows))
        found = disagreement(rows)
        if found is None:
            return
        problem, remedy = found
        if any(CallHeader(*row).refused for row in rows):
            errors = self.wire.gather_objects(error)
            rank = next(rank for rank, text in enumerate(errors) if text is not None)
            problem, remedy = f"Rank {rank} refused the step: {errors[rank]}", "This rank has not updated anything."
        raise SPMDError(problem, remedy=remedy)

    def _send(self) -> None:
        with mark("header", 8 * len(self.header)):
            self._pending = self.wire.gather_numbers(torch.tensor(self.header, device=self.device))


def _place(place: int, phase: str) -> int:
    return place if phase == "inside" else place + _AFTER
