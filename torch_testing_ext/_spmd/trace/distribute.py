"""Distribution in place: the first call turns parameters and optimizer states into DTensors.

All values come from rank 0, in large broadcasts. All new tensors are created before the first one is installed, so
that an error in between leaves model and optimizer unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torch_testing_ext._torch.spmd import tree

from ..param_layout import Layout
from .substitution import supersede
from .train_state import StateEntry, StepState

_tree = tree()
_CHUNK_BYTES = 64 * 1024 * 1024


def to_dtensor(local: torch.Tensor, whole: torch.Tensor | torch.Size, layout: Layout, mesh: DeviceMesh) -> DTensor:
    """A DTensor of the shape of `whole`, with `local` as this rank's part."""
    shape = whole if isinstance(whole, torch.Size) else whole.shape
    stride = local.stride() if local.shape == shape else _contiguous_stride(shape)
    return DTensor.from_local(local, mesh, [layout.placement], run_check=False, shape=shape, stride=stride)


def _contiguous_stride(shape: Iterable[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(tuple(shape)):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def layout_owner(entry: StateEntry, j: int, state: StepState) -> int | None:
    """The parameter whose layout leaf `j` of an optimizer's state shares, if any. A step count never shares one."""
    leaf = entry.leaves[j]
    if entry.owner is None or not isinstance(leaf, torch.Tensor) or is_step_count(entry.names[j]):
        return None
    return entry.owner if leaf.shape == state.params[entry.owner].value.shape else None


def is_step_count(name: str) -> bool:
    """Whether a leaf of an optimizer's state, by its name, is a step count."""
    return name.endswith("['step']")


def distribute(state: StepState, layouts: list[Layout], mesh: DeviceMesh, grads: list[bool]) -> None:
    """Give every rank the values of rank 0 and the mean of the gradients that any rank has, then install DTensors."""
    group = mesh.get_group()
    with torch.no_grad():
        broadcast_(_plain_tensors(state), state.device, group)
        average_gradients_(state, grads, group)
        install_distributed(state, layouts, mesh)


def _plain_tensors(state: StepState) -> list[torch.Tensor]:
    registered = [ref.value.detach() for ref in (*state.params, *state.buffers)]
    states = [leaf for entry in state.optimizer_states() for leaf in entry.leaves if isinstance(leaf, torch.Tensor)]
    return [tensor for tensor in (*registered, *states) if not isinstance(tensor, DTensor)]


def broadcast_(tensors: list[torch.Tensor], device: torch.device, group: dist.ProcessGroup) -> None:
    """Overwrite `tensors`, of any dtypes and devices, with those of rank 0, in chunks of bytes."""
    chunk: list[torch.Tensor] = []
    size = 0
    # Widest dtype first: this aligns every tensor in the chunk to its dtype, so that the bytes can be viewed as it.
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
    pieces = flat.split_with_sizes([tensor.numel() * tensor.element_size() for tensor in tensors])
    for tensor, piece in zip(tensors, pieces, strict=True):
        tensor.copy_(piece.view(tensor.dtype).view(tensor.shape))


def average_gradients_(state: StepState, present: list[bool], group: dist.ProcessGroup) -> None:
    """Average the gradients that exist before the first call, which are a rank's own contribution, as for DDP."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for ref, has_grad in zip(state.params, present, strict=True):
        if has_grad and not isinstance(ref.value, DTensor):
            if ref.value.grad is None:
                ref.value.grad = torch.zeros_like(ref.value)
            by_dtype.setdefault(ref.value.grad.dtype, []).append(ref.value.grad)
    for grads in by_dtype.values():
        flat = torch.cat([grad.reshape(-1) for grad in grads]).mul_(1 / group.size())
        dist.all_reduce(flat, group=group)
        for grad, piece in zip(grads, flat.split_with_sizes([grad.numel() for grad in grads]), strict=True):
            grad.copy_(piece.view(grad.shape))


def install_distributed(state: StepState, layouts: list[Layout], mesh: DeviceMesh) -> None:
    """Replace plain parameters, their gradients and states with DTensors, without communication."""
    entries = state.optimizer_states()
    params = [
        _distributed_parameter(ref.value, layout, mesh) for ref, layout in zip(state.params, layouts, strict=True)
    ]
    states = [_distributed_state(entry, state, layouts, mesh) for entry in entries]
    for ref, param in zip(state.params, params, strict=True):
        for slot in ref.slots:
            put_parameter(slot.module, slot.name, param)
    for optimizer in state.optimizers:
        for group in optimizer.param_groups:
            group["params"][:] = [params[state.known_index(param)] for param in group["params"]]
        optimizer.state.clear()
    for entry, value in zip(entries, states, strict=True):
        key = entry.key if entry.owner is None else params[entry.owner]
        state.optimizers[entry.optimizer].state[key] = value
    for ref, param in zip(state.params, params, strict=True):
        if ref.value is not param:
            supersede(ref.value, param)
        ref.value = param
    state.reindex()


def _distributed_parameter(old: torch.Tensor, layout: Layout, mesh: DeviceMesh) -> nn.Parameter:
    if isinstance(old, DTensor):
        return old  # type: ignore[return-value]
    local = layout.local_part(old.detach())
    param = nn.Parameter(to_dtensor(local, old, layout, mesh), requires_grad=old.requires_grad)
    param.__dict__.update(old.__dict__)  # attributes that users have set
    if old.grad is not None:
        param.grad = to_dtensor(layout.local_part(old.grad), old.grad, layout, mesh)
    return param


def _distributed_state(entry: StateEntry, state: StepState, layouts: list[Layout], mesh: DeviceMesh) -> Any:
    if entry.owner is None:
        return entry.value
    layout = layouts[entry.owner]
    leaves = [
        to_dtensor(layout.local_part(leaf), leaf, layout, mesh)
        if not isinstance(leaf, DTensor) and layout_owner(entry, j, state) is not None
        else leaf
        for j, leaf in enumerate(entry.leaves)
    ]
    return _tree.tree_unflatten(leaves, entry.spec)


def put_parameter(module: nn.Module, name: str, value: Any) -> None:
    """Register `value` under `name`, also in the second list of weights that recurrent modules keep."""
    module._parameters[name] = value
    if isinstance(module, nn.RNNBase) and "_flat_weights" in module.__dict__:
        module._flat_weights = [module._parameters[n] for n in module._flat_weights_names]
