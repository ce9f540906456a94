"""What each collective does to the tensors of all ranks, once they are in one place. Pure, but for writing results.

`brought[rank]` is what that rank called the collective with. Outputs are written through `detach()`: c10d does not
tell autograd of what it writes either.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

_Together = Callable[[list[Tensor]], Tensor]


def _stacked(reduce: Callable[[Tensor], Tensor]) -> _Together:
    return lambda tensors: reduce(torch.stack(tensors))


def _pairwise(reduce: Callable[[Tensor, Tensor], Tensor]) -> _Together:
    return lambda tensors: functools.reduce(reduce, tensors)


_REDUCTIONS: dict[Any, _Together] = {
    ReduceOp.SUM: _stacked(lambda all: all.sum(0)),
    ReduceOp.AVG: _stacked(lambda all: all.mean(0)),
    ReduceOp.PRODUCT: _stacked(lambda all: all.prod(0)),
    ReduceOp.MIN: _stacked(lambda all: all.amin(0)),
    ReduceOp.MAX: _stacked(lambda all: all.amax(0)),
    ReduceOp.BAND: _pairwise(torch.bitwise_and),
    ReduceOp.BOR: _pairwise(torch.bitwise_or),
    ReduceOp.BXOR: _pairwise(torch.bitwise_xor),
}


def _reduced(tensors: Sequence[Tensor], op: Any) -> Tensor:
    """On the first one's device."""
    here = [tensor.detach().to(tensors[0].device) for tensor in tensors]
    kind = getattr(op, "op", op)
    if kind == ReduceOp.PREMUL_SUM:
        return torch.stack([tensor * op.factor for tensor in here]).sum(0)
    if kind not in _REDUCTIONS:
        raise NotImplementedError(f"threads cannot reduce by {kind}; they can by {', '.join(map(str, _REDUCTIONS))}")
    return _REDUCTIONS[kind](here)


def _write(target: Tensor, source: Tensor) -> None:
    # Not copy_ alone, which would broadcast to a place of another size without a word.
    target.detach().copy_(source.detach().reshape(target.shape))


def all_reduce(brought: list[list[Tensor]], op: Any) -> None:
    for tensors in zip(*brought, strict=True):
        result = _reduced(tensors, op)
        for tensor in tensors:
            _write(tensor, result)


def reduce(brought: list[list[Tensor]], op: Any, root: int) -> None:
    for tensors in zip(*brought, strict=True):
        _write(tensors[root], _reduced(tensors, op))


def broadcast(brought: list[list[Tensor]], root: int) -> None:
    for tensors in zip(*brought, strict=True):
        for tensor in tensors:
            if tensor is not tensors[root]:
                _write(tensor, tensors[root])


def all_gather(brought: list[tuple[list[Tensor], Tensor]]) -> None:
    """(a place for each rank's tensor, the own tensor)"""
    for places, _ in brought:
        for place, (_, tensor) in zip(places, brought, strict=True):
            _write(place, tensor)


def gather(brought: list[tuple[list[Tensor], Tensor]], root: int) -> None:
    """(places: at the root only, the own tensor)"""
    places, _ = brought[root]
    for place, (_, tensor) in zip(places, brought, strict=True):
        _write(place, tensor)


def scatter(brought: list[tuple[Tensor, list[Tensor]]], root: int) -> None:
    """(the own place, a tensor for each rank: at the root only)"""
    _, tensors = brought[root]
    for (place, _), tensor in zip(brought, tensors, strict=True):
        _write(place, tensor)


def reduce_scatter(brought: list[tuple[Tensor, list[Tensor]]], op: Any) -> None:
    """(the own place, a tensor for each rank)"""
    places = [place for place, _ in brought]
    # All results first: a place may be part of what is reduced.
    results = [_reduced(tensors, op) for tensors in zip(*(tensors for _, tensors in brought), strict=True)]
    for place, result in zip(places, results, strict=True):
        _write(place, result)


def all_to_all(brought: list[tuple[list[Tensor], list[Tensor]]]) -> None:
    """(a place for what each rank sends, a tensor for each rank)"""
    for receiver, (places, _) in enumerate(brought):
        for place, (_, tensors) in zip(places, brought, strict=True):
            _write(place, tensors[receiver])


def pieces(tensor: Tensor, sizes: Sequence[int] | None, count: int) -> list[Tensor]:
    """A buffer's parts along dim 0, one for each rank: of these sizes, or equal ones."""
    return list(tensor.detach().split(list(sizes)) if sizes else tensor.detach().tensor_split(count))
