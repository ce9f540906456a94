"""The one conversation before anything is changed: do all ranks have the same program for the same model?

A rank that cannot compile the step must say so, or the others would wait for it in their first collective.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from ..errors import SPMDError


@dataclass
class Proposal:
    """What one rank is about to do. `facts` must be the same on all ranks: title -> one line for each thing."""

    error: str | None = None
    facts: dict[str, list[str]] = field(default_factory=dict)
    present_grads: list[bool] = field(default_factory=list)


def agree(mine: Proposal, group: dist.ProcessGroup) -> list[Proposal]:
    """All ranks' proposals, if they can be carried out together; else an error, on every rank."""
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, mine, group=group)
    if mine.error is not None:
        return everyone  # the caller raises its own error
    failed = [rank for rank, proposal in enumerate(everyone) if proposal.error is not None]
    if failed:
        raise SPMDError(
            f"Rank {failed[0]} could not compile the step: {everyone[failed[0]].error}",
            remedy="This rank could, and has changed nothing. Mend the step or the model on that rank.",
        )
    for title in mine.facts:
        for rank, proposal in enumerate(everyone):
            _compare(title, everyone[0].facts[title], proposal.facts[title], rank)
    return everyone


def _compare(title: str, first: list[str], other: list[str], rank: int) -> None:
    if first == other:
        return
    missing = f"nothing (rank 0 has {len(first)}, rank {rank} has {len(other)})"
    pairs = zip([*first, *[missing] * len(other)], [*other, *[missing] * len(first)], strict=False)
    here, there = next((a, b) for a, b in pairs if a != b)
    raise SPMDError(
        f"The ranks differ in their {title}. Rank 0: {here}. Rank {rank}: {there}.",
        remedy="Build the same model and optimizer, and run the same step, on every rank; only values may differ.",
    )
