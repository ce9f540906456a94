"""Checks of the state that a call has found, before anything of it is changed."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torch_testing_ext._torch.tensors import pytrees
from torch_testing_ext._torch.training import gradient_hooks

from .modes import SPMDError

_WRAPPERS = {
    "DistributedDataParallel": "wrapped in DistributedDataParallel",
    "FullyShardedDataParallel": "sharded by FSDP",
    "FSDPModule": "sharded by fully_shard",
}

Named = tuple[str, torch.Tensor]


def admit_modules(roots: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """Refuse a step without a model, and modules that are data parallel already."""
    if not roots and not optimizers:
        raise SPMDError(
            "The compiler finds no model and no optimizer of the step: each rank would train alone.",
            remedy="Pass the model to the step as an argument.",
        )
    for module in itertools.chain.from_iterable(root.modules() for root in roots):
        for base in type(module).__mro__:
            if base.__name__ in _WRAPPERS and base.__module__.startswith("torch."):
                raise SPMDError(
                    f"{type(module).__name__} is {_WRAPPERS[base.__name__]}: it would be averaged twice.",
                    remedy="Pass the plain module: the step averages and shards by itself.",
                )


def admit_tensors(named: Iterable[Named]) -> None:
    """Refuse tensors without values, and those that a call cannot change."""
    for name, tensor in named:
        if isinstance(tensor, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)):
            raise SPMDError(f"{name} is not initialized.", remedy="Run the lazy module once before the first call.")
        if tensor.is_meta:
            raise SPMDError(f"{name} is on the meta device.", remedy="Materialize the model before the first call.")


def admit_distributed(name: str, param: DTensor, world: int) -> None:
    """Refuse a DTensor that is not a parameter between calls."""
    placement = param.placements[0]
    if (
        param.device_mesh.ndim != 1
        or param.device_mesh.size() != world
        or not (placement.is_replicate() or placement.is_shard(0))
    ):
        raise SPMDError(
            f"Parameter {name} is a DTensor on {param.device_mesh} with placements {param.placements}.",
            remedy="Pass a plain module, or one that an earlier compiled step distributed over the same ranks.",
        )
    if gradient_hooks(param):
        raise SPMDError(
            f"Parameter {name} got a gradient hook between calls, on its DTensor, which the step does not use.",
            remedy="Register the hook before the first call or in the step, on the plain parameter.",
        )


def admit_style(name: str, is_sharded: bool, style: str) -> None:
    """Refuse a parameter that an earlier step has distributed in another style."""
    if style != "default" and is_sharded != (style == "fully_shard"):
        raise SPMDError(
            f"Parameter {name} is {'sharded' if is_sharded else 'replicated'} by another compiled step.",
            remedy='Use the same parallel_style in both steps, or parallel_style="default" in the second.',
        )


def admit_sharing(sharded: Iterable[Named], others: Iterable[Named]) -> None:
    """Refuse parameters to be sharded that share memory with another tensor: their rows would not."""
    owners: dict[int, Named] = {}
    for name, tensor in itertools.chain(sharded, ((name, tensor) for name, tensor in others)):
        if isinstance(tensor, DTensor) or tensor.layout is not torch.strided or not tensor.numel():
            continue
        other, known = owners.setdefault(tensor.untyped_storage().data_ptr(), (name, tensor))
        if known is not tensor and isinstance(known, nn.Parameter):
            raise SPMDError(
                f"{other} and {name} share memory, but are not the same tensor. Shards cannot share it.",
                remedy='Tie weights by the same Parameter (b.weight = a.weight), or use DataParallel("replicate").',
            )


def facts_of(params: Sequence[Named], buffers: Iterable[Named], optimizers: Iterable[Optimizer]) -> Iterator[str]:
    """Everything in which the ranks must agree."""
    names = {id(param): name for name, param in params}
    for name, param in params:
        yield f"parameter {name}, {_kind(param)}"
    for name, buffer in buffers:
        yield f"buffer {name}, {_kind(buffer)}"
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            members = [names.get(id(param)) for param in group["params"]]
            yield f"group {number} of {type(optimizer).__name__} with the parameters {members}"
        for key, value in optimizer.state.items():
            owner = names.get(id(key)) if isinstance(key, torch.Tensor) else repr(key)
            for path, leaf in pytrees.tree_flatten_with_path(value)[0]:
                yield f"state {owner}{pytrees.keystr(path)}, {_kind(leaf)}"


def _kind(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    placements = f", {leaf.placements}" if isinstance(leaf, DTensor) else ""
    return f"{leaf.dtype} of shape {tuple(leaf.shape)}{placements}"


def compare_facts(of_ranks: Sequence[Sequence[str]]) -> None:
    """Raise an error if two ranks have different state."""
    for rank, facts in enumerate(of_ranks):
        for mine, theirs in itertools.zip_longest(of_ranks[0], facts, fillvalue="nothing"):
            if mine != theirs:
                raise SPMDError(
                    f"The ranks differ. Rank 0 has {mine}. Rank {rank} has {theirs}.",
                    remedy="Build the same model and optimizer on every rank; only values may differ.",
                )
