"""Checks of a sharding rule.

They run a sample on local shards and compare the gathered result with the full one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from torch_testing_ext._torch.signs import error_texts
from torch_testing_ext._torch.tensors import dtensor_parts
from torch_testing_ext._torch.tensors.pytrees import tree_leaves, tree_map

__unittest = True


def validate_sharding_rule_sample(
    op: Callable[..., Any],
    full_args: tuple[Any, ...],
    full_kwargs: dict[str, Any],
    input_placements: Sequence[Placement],
    output_placements: Sequence[Placement],
    device_mesh: DeviceMesh,
) -> bool:
    """Whether the operation on local shards of the inputs returns local shards of the outputs."""
    tensors = _tensors((full_args, full_kwargs))
    locals_ = []
    for tensor, placement in zip(tensors, input_placements, strict=False):
        placed = distribute_tensor(tensor, device_mesh, (placement,))
        locals_.append(placed.to_local())
    local_args, local_kwargs = _replaced((full_args, full_kwargs), locals_)
    expected = _tensors(op(*full_args, **full_kwargs))
    got = _tensors(op(*local_args, **local_kwargs))
    for whole, local, placement in zip(expected, got, output_placements, strict=False):
        placed = DTensor.from_local(local, device_mesh, (placement,))
        if not _close(placed.full_tensor(), whole, rtol=1e-5):
            return False
    return True


def validate_sharding_rule_sample_backward(
    op: Callable[..., Any],
    full_args: tuple[Any, ...],
    full_kwargs: dict[str, Any],
    input_placements: Sequence[Placement],
    device_mesh: DeviceMesh,
) -> bool | None:
    """Whether DTensors with these placements get the gradients of full tensors. None if there is no gradient."""
    tensors = _tensors((full_args, full_kwargs))
    if len(input_placements) != len(tensors):
        raise ValueError(f"{len(input_placements)} placements for {len(tensors)} tensors")
    whole = _fresh_leaves(tensors)
    try:
        if not _run_backward(op, _replaced((full_args, full_kwargs), whole)):
            return None
    except RuntimeError:
        return None
    fresh = zip(_fresh_leaves(tensors), input_placements, strict=True)
    placed = [distribute_tensor(tensor, device_mesh, (placement,)) for tensor, placement in fresh]
    try:
        if not _run_backward(op, _replaced((full_args, full_kwargs), placed)):
            return None
    except Exception as error:
        if error_texts.is_of_unsupported_dtensor(error):
            return None
        raise
    for tensor, dtensor in zip(whole, placed, strict=True):
        if tensor.grad is not None and not _same_gradient(tensor.grad, dtensor.grad):
            return False
    return True


def _same_gradient(whole: torch.Tensor, placed: torch.Tensor | None) -> bool:
    if placed is None:
        return False
    if isinstance(placed, DTensor):
        placed = placed.full_tensor()
    return _close(placed, whole, rtol=1.3e-6)


def _close(got: torch.Tensor, expected: torch.Tensor, rtol: float) -> bool:
    if got.shape != expected.shape:
        return False
    return torch.allclose(expected, got, atol=1e-5, rtol=rtol, equal_nan=True)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _replaced(tree: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Replace the tensors of the arguments by these, in order."""
    others = iter(tensors)

    def replace(leaf: Any) -> Any:
        return next(others) if isinstance(leaf, torch.Tensor) else leaf

    return tree_map(replace, tree)


def _fresh_leaves(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]


def _run_backward(op: Callable[..., Any], arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> bool:
    """Run the backward; return whether any output requires gradients."""
    args, kwargs = arguments
    results = _tensors(op(*args, **kwargs))
    outputs = [result for result in results if result.is_floating_point() and result.requires_grad]
    if not outputs:
        return False
    total = outputs[0].sum()
    for output in outputs[1:]:
        total = total + output.sum()
    total.backward()  # type: ignore[no-untyped-call, unused-ignore]
    return True


@contextmanager
def op_strategy_context(op_overload: Any, strategy_func: Callable[..., Any], schema_info: Any = None) -> Iterator[None]:
    """Replace the strategy of an operation for the length of a `with`."""
    with dtensor_parts.replaced_op_strategy(op_overload, strategy_func, schema_info):
        yield
