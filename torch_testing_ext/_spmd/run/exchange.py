"""The exchange between ranks at the start of a call: whether any has failed, and whether any has a new program.

Ranks find or trace their programs independently. While programs are still new, ranks exchange in every call. After some
calls in which no rank had a new one, they do so ever more rarely, so that the exchange costs next to nothing.
All ranks make the same calls, and see the same answers; so they agree on when to exchange next.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..errors import SPMDError
from ..lower.lowering import LoweredProgram
from .report import count_collectives

_QUIET_CALLS = 2
_LONGEST_GAP = 32


@dataclass
class CallStatus:
    """What one rank tells the others at the start of a call."""

    failed: bool = False
    unverified: bool = False  # its program for this call has not been verified
    met_unverified: bool = False  # it has run such a program since the last exchange
    digest: int = 0  # of its program's collectives


class ExchangeSchedule:
    """Decides in which calls the ranks exchange."""

    def __init__(self) -> None:
        self.quiet, self.gap, self.waiting = 0, 0, 0

    def is_due(self) -> bool:
        """Whether this call begins with an exchange. Call it once for each call."""
        if self.waiting:
            self.waiting -= 1
            return False
        return True

    def conclude(self, quiet: bool) -> None:
        """Plan the next exchange after one in which some rank had a new program, or after a quiet one."""
        self.quiet = self.quiet + 1 if quiet else 0
        self.gap = 0 if self.quiet < _QUIET_CALLS else min(max(2 * self.gap, 1), _LONGEST_GAP)
        self.waiting = self.gap


def exchange(mine: CallStatus, device: torch.device, group: dist.ProcessGroup) -> list[CallStatus]:
    """All ranks' statuses. Raises an error on every rank, except those that failed, if some rank has failed or the
    programs of this call do not fit together."""
    flags = [mine.failed, mine.unverified, mine.met_unverified, mine.digest]
    sent = torch.tensor(list(map(int, flags)), dtype=torch.int64, device=device)
    received = [torch.empty_like(sent) for _ in range(group.size())]
    dist.all_gather(received, sent, group=group)
    statuses = [CallStatus(bool(a), bool(b), bool(c), int(d)) for a, b, c, d in (each.tolist() for each in received)]
    if mine.failed:
        return statuses  # the caller raises its own error
    failed = [rank for rank, status in enumerate(statuses) if status.failed]
    if failed:
        raise SPMDError(
            f"Rank {failed[0]} could not compile this call of the step.",
            remedy="See that rank's error. This rank has changed nothing.",
        )
    for rank, status in enumerate(statuses):
        if status.digest != statuses[0].digest:
            raise SPMDError(
                f"The programs of rank 0 and rank {rank} for this call communicate differently: the step takes "
                "different branches on different ranks.",
                remedy="Let no branch of the step, and no change between calls, depend on the rank or on its batch.",
            )
    return statuses


def digest_of(program: LoweredProgram) -> int:
    """A number that is the same for programs with the same collectives."""
    facts = [(b.collective, str(b.dtype), b.params, b.names, b.nbytes) for b in program.buckets]
    text = repr((facts, count_collectives(program.graph.graph)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
