"""The operations that stand for communication while a step is traced.

A step is traced as the local program that each rank runs. Where a parameter is read or a gradient made, that program
needs the other ranks; there the trace holds one of these markers, which lowering turns into bucketed collectives.
They compute nothing: each gives a tensor of the right shape, and only while tracing.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import SPMDError

_library = torch.library.Library("torch_testing_ext_spmd", "FRAGMENT")
_library.define("grad_sync(Tensor grad, int param) -> Tensor")
_library.define("gather(Tensor shard, int param, int[] shape) -> Tensor")
_library.define("scatter_grad(Tensor grad, int param, int[] shape) -> Tensor")
_library.define("neutral(Tensor shard, float value) -> Tensor")


def _fresh(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _fresh_of_shape(tensor: torch.Tensor, _param: int, shape: list[int]) -> torch.Tensor:
    return tensor.new_empty(shape)


_library.impl("grad_sync", _fresh, "Meta")
_library.impl("gather", _fresh_of_shape, "Meta")
_library.impl("scatter_grad", _fresh_of_shape, "Meta")
_library.impl("neutral", lambda shard, value: shard.new_empty(()), "Meta")

_ops = torch.ops.torch_testing_ext_spmd
GRAD_SYNC = _ops.grad_sync.default
GATHER = _ops.gather.default
SCATTER_GRAD = _ops.scatter_grad.default
# What a rank adds to the largest or smallest value over all rows when it has none: such a reduction has no result.
NEUTRAL = _ops.neutral.default


def _refuse_double_backward(grad: torch.Tensor) -> None:
    if torch.is_grad_enabled() and grad.requires_grad:
        raise SPMDError(
            "The step differentiates through a gradient (create_graph=True), whose mean over ranks has no derivative.",
            remedy="Compute gradient penalties with respect to activations, or keep this step on DDP.",
        )


def sync_gradients_of(leaf: torch.Tensor, param: int) -> None:
    """Mark the gradient of a whole parameter, once per backward, before it is accumulated."""

    def mark(grad: torch.Tensor) -> torch.Tensor:
        _refuse_double_backward(grad)
        return GRAD_SYNC(grad, param)

    leaf.register_hook(mark)


class Gather(torch.autograd.Function):
    """From a shard to the whole parameter; from the whole gradient to the shard of its mean over ranks."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, param: int, shape: torch.Size) -> torch.Tensor:
        ctx.param, ctx.shard_shape = param, shard.shape
        return GATHER(shard, param, shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        _refuse_double_backward(grad)
        return SCATTER_GRAD(grad, ctx.param, ctx.shard_shape), None, None
