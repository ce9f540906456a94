"""Tensors that torch keeps alike on all ranks of a group: those of a DDP model, and DTensors that are replicated."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn


class Replica(NamedTuple):
    """A tensor of this rank that the other members of a group hold, too. `is_buffer`: torch soon overwrites it."""

    name: str
    tensor: torch.Tensor
    is_buffer: bool = False


def tensors_of_ddp(ddp: Any) -> list[Replica]:
    """The tensors of a DDP model that are alike when its optimizer steps.

    Left out are all if the ranks average them only now and then, and the statistics of a norm, which each rank has for
    itself between two forwards. `DistributedDataParallel._comm_hooks`: 2.11 to 2.15.
    """
    if any(type(state).__name__ == "PostLocalSGDState" for _, state in getattr(ddp, "_comm_hooks", ())):
        return []
    found = [Replica(name, _local(parameter)) for name, parameter in ddp.module.named_parameters()]
    for prefix, module in ddp.module.named_modules() if ddp.broadcast_buffers else ():
        if not hasattr(module, "track_running_stats"):
            buffers = module.named_buffers(prefix, recurse=False)
            found += [Replica(name, _local(buffer), is_buffer=True) for name, buffer in buffers]
    return [replica for replica in found if replica.name not in ddp.parameters_to_ignore]


def dtensors_of(optimizer: Any, names: Callable[[], Mapping[int, str]]) -> Iterator[tuple[Any, Replica]]:
    """The replicated DTensors that an optimizer steps, each with a group of its mesh.

    `names` returns names by `id`, for an optimizer that knows none.
    """
    tensor_module = sys.modules.get("torch.distributed.tensor")
    if tensor_module is None:
        return
    for parameter_group in optimizer.param_groups:
        given = parameter_group.get("param_names") or ()
        for at, one in enumerate(parameter_group["params"]):
            if isinstance(one, tensor_module.DTensor):
                name = given[at] if at < len(given) else names().get(id(one), f"parameter {at}")
                for dim, placement in enumerate(one.placements):
                    if placement.is_replicate() and one.device_mesh.size(dim) > 1:
                        yield one.device_mesh.get_group(dim), Replica(name, _local(one))


def _local(tensor: Any) -> torch.Tensor:
    """The part of this rank, without a trace in autograd."""
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()
    return local


def names_around() -> dict[int, str]:
    """The names of parameters, by `id`, in the modules that the calling functions have at hand."""
    found: dict[int, str] = {}
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        local = frame.f_locals
        at_hand = [*local.values(), *getattr(local.get("self"), "__dict__", {}).values()]
        for module in at_hand:
            if issubclass(type(module), nn.Module):
                for name, one in module.named_parameters():
                    found.setdefault(id(one), name)
    return found


def watch_steps(before: Callable[..., None], after: Callable[..., None]) -> list[Any]:
    """Call these around each step of an optimizer. Returns what has a method `remove`."""
    from torch.optim import optimizer

    return [optimizer.register_optimizer_step_pre_hook(before), optimizer.register_optimizer_step_post_hook(after)]
