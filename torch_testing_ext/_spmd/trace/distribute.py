"""Distributing in place: the first call turns parameters and optimizer states into DTensors.

Everything comes from rank 0, in large broadcasts. All new tensors are made before the first is put into its place,
so that an error on the way leaves model and optimizer as they were.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torch_testing_ext._torch import tree

from ..layout import Layout
from .state import StateEntry, StepState

_tree = tree()
_CHUNK_BYTES = 64 * 1024 * 1024


def to_dtensor(local: torch.Tensor, whole: torch.Tensor | torch.Size, layout: Layout, mesh: DeviceMesh) -> DTensor:
    """`local`, this rank's part, as a DTensor of the whole shape."""
    shape = whole if isinstance(whole, torch.Size) else whole.shape
    stride = local.stride() if local.shape == shape else _contiguous_stride(shape)
    return DTensor.from_local(local, mesh, [layout.placement], run_check=False, shape=shape, stride=stride)


def _contiguous_stride(shape: Iterable[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(tuple(shape)):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def lies_like(entry: StateEntry, j: int, state: StepState) -> int | None:
    """The parameter that leaf `j` of an optimizer's state lies like, if any. A count of steps never does."""
    leaf = entry.leaves[j]
    if entry.owner is None or not isinstance(leaf, torch.Tensor) or is_step_count(entry.names[j]):
        return None
    return entry.owner if leaf.shape == state.params[entry.owner].value.shape else None


def is_step_count(name: str) -> bool:
    return name.endswith("['step']")


def distribute(state: StepState, layouts: list[Layout], mesh: DeviceMesh, grads: list[bool]) -> None:
    """Give every rank rank 0's values and the mean of the gradients that some rank has, and install DTensors."""
    group = mesh.get_group()
    with torch.no_grad():
        broadcast_(_plain_tensors(state), state.device, group)
        average_gradients_(state, grads, group)
        install_distributed(state, layouts, mesh)


def _plain_tensors(state: StepState) -> list[torch.Tensor]:
    held = [held.value.detach() for held in (*state.params, *state.buffers)]
    states = [leaf for entry in state.optimizer_states() for leaf in entry.leaves if isinstance(leaf, torch.Tensor)]
    return [tensor for tensor in (*held, *states) if not isinstance(tensor, DTensor)]


def broadcast_(tensors: list[torch.Tensor], device: torch.device, group: dist.ProcessGroup) -> None:
    """Overwrite `tensors`, of any dtypes and devices, with rank 0's, a chunk of bytes at a time."""
    chunk: list[torch.Tensor] = []
    size = 0
    # Widest first: then each tensor starts in the chunk where its dtype can be viewed.
    for tensor in sorted(tensors, key=lambda t: -t.element_size()):
        chunk.append(tensor)
        size += tensor.numel() * tensor.element_size()
        if size >= _CHUNK_BYTES:
            _broadcast_chunk_(chunk, device, group)
            chunk, size = [], 0
    if chunk:
        _broadcast_chunk_(chunk, device, group)


def _broadcast_chunk_(tensors: list[torch.Tensor], device: torch.device, group: dist.ProcessGroup) -> None:
    flat = torch.cat([tensor.contiguous().view(-1).view(torch.uint8).to(device) for tensor in tensors])
    dist.broadcast(flat, src=dist.get_global_rank(group, 0), group=group)
    pieces = flat.split([tensor.numel() * tensor.element_size() for tensor in tensors])
    for tensor, piece in zip(tensors, pieces, strict=True):
        tensor.copy_(piece.view(tensor.dtype).view(tensor.shape))


def average_gradients_(state: StepState, present: list[bool], group: dist.ProcessGroup) -> None:
    """A gradient that exists before the first call is a rank's own share, as it is for DDP: take the mean."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for held, wanted in zip(state.params, present, strict=True):
        if wanted and not isinstance(held.value, DTensor):
            if held.value.grad is None:
                held.value.grad = torch.zeros_like(held.value)
            by_dtype.setdefault(held.value.grad.dtype, []).append(held.value.grad)
    for grads in by_dtype.values():
        flat = torch.cat([grad.reshape(-1) for grad in grads]).mul_(1 / group.size())
        dist.all_reduce(flat, group=group)
        for grad, piece in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(piece.view(grad.shape))


def install_distributed(state: StepState, layouts: list[Layout], mesh: DeviceMesh) -> None:
    """Replace plain parameters, their gradients and states by DTensors. No communication: each rank cuts its own."""
    entries = state.optimizer_states()
    params = [_distributed_parameter(held.value, at, mesh) for held, at in zip(state.params, layouts, strict=True)]
    states = [_distributed_state(entry, state, layouts, mesh) for entry in entries]
    for held, param in zip(state.params, params, strict=True):
        for slot in held.slots:
            put_parameter(slot.module, slot.name, param)
    for optimizer in state.optimizers:
        for group in optimizer.param_groups:
            group["params"][:] = [params[state.known_index(param)] for param in group["params"]]
        optimizer.state.clear()
    for entry, value in zip(entries, states, strict=True):
        key = entry.key if entry.owner is None else params[entry.owner]
        state.optimizers[entry.optimizer].state[key] = value
    for held, param in zip(state.params, params, strict=True):
        held.value = param
    state.reindex()


def _distributed_parameter(old: torch.Tensor, layout: Layout, mesh: DeviceMesh) -> nn.Parameter:
    if isinstance(old, DTensor):
        return old  # type: ignore[return-value]
    local = layout.local_part(old.detach())
    param = nn.Parameter(to_dtensor(local, old, layout, mesh), requires_grad=old.requires_grad)
    if old.grad is not None:
        param.grad = to_dtensor(layout.local_part(old.grad), old.grad, layout, mesh)
    return param


def _distributed_state(entry: StateEntry, state: StepState, layouts: list[Layout], mesh: DeviceMesh) -> Any:
    if entry.owner is None:
        return entry.value
    layout = layouts[entry.owner]
    leaves = [
        to_dtensor(layout.local_part(leaf), leaf, layout, mesh)
        if not isinstance(leaf, DTensor) and lies_like(entry, j, state) is not None
        else leaf
        for j, leaf in enumerate(entry.leaves)
    ]
    return _tree.tree_unflatten(leaves, entry.spec)


def put_parameter(module: nn.Module, name: str, value: Any) -> None:
    """Register `value` under `name`. Recurrent modules keep a second list of their weights."""
    module._parameters[name] = value
    if isinstance(module, nn.RNNBase) and "_flat_weights" in module.__dict__:
        module._flat_weights = [module._parameters[n] for n in module._flat_weights_names]
