"""The check, before anything is changed, that all ranks have the same program for the same model.

A rank that cannot compile the step must tell the others, or they would wait for it in their first collective.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from ..spmd_errors import SPMDError


@dataclass
class Proposal:
    """The program of one rank, as compared with the other ranks'.

    `facts` must be the same on all ranks. It maps a title to one line per parameter, buffer, ...
    """

    error: str | None = None
    stage: str = "first"  # "first" call for a model, or "later"
    facts: dict[str, list[str]] = field(default_factory=dict)
    present_grads: list[bool] = field(default_factory=list)
    unverified: bool = False  # the program of this call has not been verified
    exempt: bool = False  # from verification
    met_unverified: bool = False  # such a program has run since the ranks' last exchange


def agree(mine: Proposal, group: dist.ProcessGroup) -> list[Proposal]:
    """Return all ranks' proposals if they are compatible; otherwise raise an error on every rank."""
    proposals: list[Any] = [None] * group.size()
    dist.all_gather_object(proposals, mine, group=group)
    if mine.error is not None:
        return proposals  # the caller raises its own error
    failed = [rank for rank, proposal in enumerate(proposals) if proposal.error is not None]
    if failed:
        raise SPMDError(
            f"Rank {failed[0]} could not compile the step: {proposals[failed[0]].error}",
            remedy="This rank could, and has changed nothing. Fix the step or the model on that rank.",
        )
    for rank, proposal in enumerate(proposals):
        if proposal.stage != proposals[0].stage:
            raise SPMDError(
                f"Rank 0 is in its {proposals[0].stage} call of a step, and rank {rank} in its {proposal.stage} call.",
                remedy="Call the same compiled steps in the same order, with the same model, on every rank.",
            )
    for title in mine.facts:
        for rank, proposal in enumerate(proposals):
            _compare(title, proposals[0].facts[title], proposal.facts[title], rank)
    return proposals


def _compare(title: str, first: list[str], other: list[str], rank: int) -> None:
    if first == other:
        return
    missing = f"nothing (rank 0 has {len(first)}, rank {rank} has {len(other)})"
    pairs = zip([*first, *[missing] * len(other)], [*other, *[missing] * len(first)], strict=False)
    on_first, on_other = next((a, b) for a, b in pairs if a != b)
    raise SPMDError(
        f"The ranks differ in their {title}. Rank 0: {on_first}. Rank {rank}: {on_other}.",
        remedy="Build the same model and optimizer, and run the same step, on every rank; only values may differ. "
        "A step that branches must take the same branch on every rank.",
    )
