"""Marker operations: placeholders for communication in the graph of a traced step.

A step is traced as the local program of one rank. Where a gradient is complete, or a sharded parameter is read, this
program needs data from the other ranks. There the graph has a marker, which lowering turns into bucketed collectives.
Markers compute nothing: each returns a tensor of the right shape, and only while tracing.
"""

from __future__ import annotations

from typing import Any

import torch

from ..spmd_errors import SPMDError
from .trace_modes import TraceWatch

_new_library: Any = torch.library.Library  # untyped in torch
_library = _new_library("torch_testing_ext_spmd", "FRAGMENT")
_library.define("grad_sync(Tensor grad, int param) -> Tensor")
_library.define("gather(Tensor shard, int param, int[] shape) -> Tensor")
_library.define("scatter_grad(Tensor grad, int param, int[] shape) -> Tensor")


def _new_like(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _new_of_shape(tensor: torch.Tensor, _param: int, shape: list[int]) -> torch.Tensor:
    return tensor.new_empty(shape)


_library.impl("grad_sync", _new_like, "Meta")
_library.impl("gather", _new_of_shape, "Meta")
_library.impl("scatter_grad", _new_of_shape, "Meta")

_ops: Any = torch.ops.torch_testing_ext_spmd
GRAD_SYNC = _ops.grad_sync.default
GATHER = _ops.gather.default
SCATTER_GRAD = _ops.scatter_grad.default


def _refuse_double_backward(grad: torch.Tensor) -> None:
    if torch.is_grad_enabled() and grad.requires_grad:
        raise SPMDError(
            "The step differentiates through a gradient (create_graph=True), whose mean over ranks has no derivative.",
            remedy="Compute gradient penalties with respect to activations, or use DDP for this step.",
        )


def sync_gradients_of(leaf: torch.Tensor, param: int, name: str, watch: TraceWatch) -> None:
    """Insert a marker on the gradient of a parameter, once per backward, before it is accumulated."""

    def mark(grad: torch.Tensor) -> Any:
        if watch.inside_autograd_grad:
            return grad  # a rank's own, as under DDP
        watch.backwards += 1
        _refuse_double_backward(grad)
        if grad.layout is not torch.strided:
            raise SPMDError(
                f"The gradient of {name} is sparse, but the data-parallel program reduces only dense gradients.",
                remedy="Create the module with dense gradients (sparse=False), or use DDP for this step.",
            )
        return GRAD_SYNC(grad, param)

    register_hook: Any = leaf.register_hook  # untyped in torch
    register_hook(mark)
