"""Values of rank 0 that all ranks get when a call begins."""

import itertools
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torch_testing_ext._torch.tensors import pytrees

from .agreement import StepMeeting
from .layout import as_real


def state_tensors(optimizers: Iterable[Optimizer]) -> list[torch.Tensor]:
    """The plain tensors in the states of optimizers."""
    leaves = [leaf for optimizer in optimizers for leaf in pytrees.tree_leaves(dict(optimizer.state))]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor)]


@torch.no_grad()
def make_plain(optimizers: Iterable[Optimizer]) -> None:
    """Let states that are DTensors, such as those of a sharded checkpoint, be whole as their plain parameters are."""
    for values in itertools.chain.from_iterable(optimizer.state.values() for optimizer in optimizers):
        if isinstance(values, dict):
            values.update(pytrees.tree_map_only(DTensor, DTensor.full_tensor, values))


@torch.no_grad()
def broadcast(meeting: StepMeeting, tensors: Iterable[torch.Tensor]) -> None:
    """Give all ranks rank 0's values. Sparse tensors stay the rank's own."""
    if meeting.world == 1:
        return
    kinds: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.layout is torch.strided and tensor.numel():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for alike in kinds.values():
        sent = torch.cat([as_real(tensor).reshape(-1) for tensor in alike]).to(meeting.device)
        dist.broadcast(sent, dist.get_global_rank(meeting.group, 0), meeting.group)
        # The steps of Adam are on the CPU, whatever its parameters are on.
        received = sent.to(alike[0].device)
        parts = received.split([as_real(tensor).numel() for tensor in alike])  # type: ignore[no-untyped-call]
        for tensor, part in zip(alike, parts, strict=True):
            real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
            if not torch.equal(real.reshape(-1), part):
                real.copy_(part.view(real.shape))
