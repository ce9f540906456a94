"""The place where ranks compare their headers: once per call, and before a backward that they have not planned."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..spmd_errors import SPMDError
from .call_header import REFUSED, CallHeader, disagreement
from .wire import PendingNumbers, Wire

_AFTER = 1000  # the places of backwards that run after a call


class MeetingPoint:
    """Exchanges headers with the other ranks."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.device = torch.device("cpu")
        self.header = CallHeader()
        self.error: str | None = None  # why this rank refuses the call
        self._checksum: Callable[[], torch.Tensor | None] = lambda: None
        self._pending: PendingNumbers | None = None
        self._has_met = False

    def begin(self, header: CallHeader, device: torch.device, checksum: Callable[[], torch.Tensor | None]) -> None:
        """Begin a call: its first meeting is due."""
        self.header, self.device, self._checksum = header, device, checksum
        self._pending, self._has_met, self.error = None, False, None

    def meet(self) -> None:
        """Meet now, if this call has not."""
        self.arrive(self.header.params)
        self.check()

    def meet_without_checksum(self) -> None:
        """Meet before the call knows all its parameters."""
        self._checksum = lambda: None
        self.meet()

    def arrive(self, params: int) -> None:
        """Send this rank's header, if the call has not yet, without waiting for the others."""
        if not self._has_met and self.wire.world > 1:
            self._has_met = True
            self._send(self.header._replace(params=params), self._checksum())

    def check(self) -> None:
        """Wait for the headers that are on their way, and compare them."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        rows = pending.rows()
        found = disagreement(rows)
        if found is None:
            return
        problem, remedy = found
        if any(row[5] == REFUSED for row in rows):
            errors = self.wire.gather_objects(self.error)
            rank = next(rank for rank, error in enumerate(errors) if error is not None)
            problem, remedy = f"Rank {rank} refused the step: {errors[rank]}", "This rank has changed nothing."
        raise SPMDError(problem, remedy=remedy)

    def refuse(self, error: BaseException) -> None:
        """Tell the other ranks, when they meet, that this rank does not take part in the call."""
        self.error = f"{type(error).__name__}: {error}"
        if self.wire.world == 1 or self._has_met:
            return
        self._has_met = True
        self._send(self.header._replace(status=REFUSED), None)
        assert self._pending is not None
        self._pending.rows()
        self._pending = None
        self.wire.gather_objects(self.error)

    def confirm(self, place: int, params: int, phase: str) -> None:
        """Meet before a backward that this rank has not planned, or that differs from the plan."""
        place += 0 if phase == "inside" else _AFTER
        self._send(self.header._replace(place=place, params=params), None)
        self.check()

    def _send(self, header: CallHeader, checksum: torch.Tensor | None) -> None:
        if checksum is not None and checksum.device.type == "cpu":
            header = header._replace(checksum=int(checksum))
        numbers = torch.tensor(header, device=self.device)
        if checksum is not None and checksum.device.type != "cpu":
            numbers[-1] = checksum  # without a wait for the device
        self._pending = self.wire.gather_numbers(numbers)
