"""The checks of modules, parameters and buffers before the engine takes them. They change nothing."""

from collections.abc import Iterable
from typing import NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torch_testing_ext._torch.spmd import gradient_hooks, storage_key

from ..spmd_errors import SPMDError
from .managed_params import ManagedParam, managed_by

# Recognized by name: importing the FSDP packages for an isinstance check would cost every rank half a second.
_WRAPPERS = {
    "DistributedDataParallel": "wrapped in DistributedDataParallel",
    "FullyShardedDataParallel": "sharded by FSDP",
    "FSDPModule": "sharded by FSDP",
}


def admit_modules(roots: Iterable[nn.Module]) -> None:
    """Refuse modules that are data parallel already."""
    for root in roots:
        for module in root.modules():
            for base in type(module).__mro__:
                if base.__name__ in _WRAPPERS and base.__module__.startswith("torch."):
                    raise SPMDError(
                        f"{type(module).__name__} is {_WRAPPERS[base.__name__]}: it would be averaged twice.",
                        remedy="Pass the plain module: the step averages and shards by itself.",
                    )


def admit_tensor(name: str, tensor: torch.Tensor) -> None:
    """Refuse parameters and buffers without values, and DTensors of other meshes."""
    if isinstance(tensor, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)):
        raise SPMDError(f"{name} is not initialized.", remedy="Run the lazy module once before the first call.")
    if tensor.is_meta:
        raise SPMDError(
            f"{name} is on the meta device and has no values.",
            remedy='Materialize the model before the first call: model.to_empty(device="cpu"), then initialize it.',
        )
    if isinstance(tensor, DTensor) and not isinstance(tensor, nn.Parameter):
        raise SPMDError(f"{name} is a DTensor, but no parameter.", remedy="Register it as a plain buffer.")


def admit_inference(params: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse parameters that are to be DTensors and cannot be."""
    for name, tensor in params:
        if tensor.is_inference():
            raise SPMDError(
                f"{name} was made in inference_mode and cannot become a DTensor.",
                remedy='Make it under no_grad, or use DataParallel("replicate", between="plain").',
            )


def admit_sharing(sharded: Iterable[tuple[str, torch.Tensor]], others: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse sharded parameters that share memory with another tensor: rows would no longer be shared."""
    owners: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in sharded:
        if isinstance(tensor, DTensor):
            continue
        key = storage_key(tensor)
        if key in owners:
            _refuse_sharing(owners[key][0], name)
        owners[key] = name, tensor
    for name, tensor in others:
        if tensor.layout is not torch.strided or isinstance(tensor, DTensor):
            continue
        owner, param = owners.get(storage_key(tensor), ("", tensor))
        if param is not tensor:
            _refuse_sharing(owner, name)


def _refuse_sharing(one: str, other: str) -> None:
    raise SPMDError(
        f"{one} and {other} share memory, but are not the same tensor. Shards cannot share it.",
        remedy='Tie weights by the same Parameter (b.weight = a.weight), or use DataParallel("replicate").',
    )


def admit_held(tensors: Iterable[torch.Tensor]) -> None:
    """Refuse DTensors that something besides modules and optimizers holds: the step would use them, and not update."""
    for tensor in tensors:
        managed = managed_by(tensor)
        if managed is not None and managed.rests_as_dtensor and tensor is managed.rest:
            refuse_held(managed, "A list, a dict, an argument or an attribute is or holds")


def refuse_held(managed: ManagedParam, holder: str) -> NoReturn:
    """Raise the error about the DTensor of a parameter in a call."""
    raise SPMDError(
        f"{holder} the DTensor of parameter {managed.name}, which the model does not use in a call.",
        remedy="Make it before the first call or in the step; hold an optimizer where the step finds it.",
    )


def admit_hooks(tensors: Iterable[torch.Tensor]) -> None:
    """Refuse gradient hooks that were put on a DTensor between calls: the step does not use it."""
    for tensor in tensors:
        if isinstance(tensor, DTensor) and gradient_hooks(tensor):
            raise SPMDError(
                f"A parameter of shape {tuple(tensor.shape)} got a gradient hook between calls, on its DTensor.",
                remedy="Register the hook before the first call or in the step, on the plain parameter.",
            )
