"""The place where ranks compare their headers: once per call, and before a backward that they have not planned.

A step whose gradients are planned sends a hash of the header with its first bucket, which costs nothing. Others send
the header before anything else. If hashes differ, all ranks send their headers, and know why.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import torch

from ..spmd_errors import SPMDError
from .call_header import LEAVING, REFUSED, CallHeader, disagreement
from .gradient_buckets import BackwardPlan
from .step_picture import mark
from .wire import PendingNumbers, Wire

_AFTER = 1000  # the places of backwards that run after a call


class MeetingPoint:
    """Exchanges headers with the other ranks."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.device = torch.device("cpu")
        self.header = CallHeader()
        self.plan: BackwardPlan | None = None  # whose first bucket opens the call
        self.reads = 0  # of any rank, as told by the last headers
        self._checksum: Callable[[], torch.Tensor | None] = lambda: None
        self._pending: PendingNumbers | None = None
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
            self._checksum = lambda: None
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

    def settle(self, reads: bool) -> bool:
        """Meet at a read of what is not gathered, or at the end of a call. Returns whether any rank reads."""
        kept = self.header
        self.header = kept._replace(place=LEAVING, reads=int(reads))
        self._send()
        self.check()
        self.header = kept
        return bool(self.reads)

    def check(self) -> None:
        """Wait for the headers that are on their way, and compare them."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._compare(pending.rows(), None)

    def explain(self, error: str | None = None) -> None:
        """Exchange headers, because hashes differ, and raise an error that names the difference."""
        self._send()
        assert self._pending is not None
        rows = self._pending.rows()
        self._pending = None
        self._compare(rows, error)
        raise SPMDError(
            "The ranks are in different places of a step.",
            remedy="Call the same steps in the same order on every rank.",
        )

    def refuse(self, error: BaseException) -> None:
        """Tell the other ranks, when they meet, that this rank does not take part in the call."""
        if self.wire.world == 1 or self._has_met:
            return
        self._has_met = True
        self.header = self.header._replace(status=REFUSED)
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
            assert self._pending is not None
            rows = self._pending.rows()
            self._pending = None
            self._compare(rows, error)
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
        if any(CallHeader(*row).status == REFUSED for row in rows):
            errors = self.wire.gather_objects(error)
            rank = next(rank for rank, text in enumerate(errors) if text is not None)
            problem, remedy = f"Rank {rank} refused the step: {errors[rank]}", "This rank has not updated anything."
        raise SPMDError(problem, remedy=remedy)

    def _send(self) -> None:
        with mark("header", 8 * len(self.header)):
            self._pending = self.wire.gather_numbers(torch.tensor(self.header, device=self.device))


def _place(place: int, phase: str) -> int:
    return place if phase == "inside" else place + _AFTER
