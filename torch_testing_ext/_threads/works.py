"""PyTorch's objects that execute a collective, for process groups of others: `work(data)` gets each rank's arguments.

`data[rank]` is what that rank passed to the method of ProcessGroup, lists of lists included.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from torch_testing_ext import _torch

from . import collectives

Data = Sequence[Any]


def flatten_list(lst: Any) -> list[Any]:
    return pytree.tree_leaves(lst)


def ret_work(ret: Any) -> dist.Work:
    """Return a finished work with this result."""
    return _torch.threads.finished_work(ret)


def binop_reduce(tensors: Sequence[torch.Tensor], op: Callable[..., Any]) -> torch.Tensor:
    """Apply a reduction such as `torch.sum` or `torch.max` over tensors of the same shape."""
    result = op(torch.stack(list(tensors)), dim=0)
    return result if isinstance(result, torch.Tensor) else result.values


def bitwise_reduce(
    tensors: Sequence[torch.Tensor], op: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    return functools.reduce(op, tensors)


def _only(items: Any) -> Any:
    """Unpack a list of one item: a rank has one device."""
    if len(items) != 1:
        raise AssertionError(f"a rank must pass one tensor or list here, not {len(items)}")
    return items[0]


class AllReduce:
    """Reduces each tensor over all ranks, in place."""

    def __init__(self, op: Any) -> None:
        collectives.check_reduction(op)
        self.op = op

    @torch.no_grad()
    def work(self, data: Data) -> None:
        collectives.all_reduce([list(tensors) for tensors in data], self.op)


class AllGather:
    """Copies the tensor of each rank to all ranks."""

    @torch.no_grad()
    def work(self, data: Data) -> None:
        collectives.all_gather([(_only(outputs), _only(inputs)) for outputs, inputs in data])


class Scatter:
    """Copies one tensor of rank `src` to each rank."""

    def __init__(self, src: int) -> None:
        self.src = src

    @torch.no_grad()
    def work(self, data: Data) -> None:
        arguments = [
            (_only(outputs), _only(inputs) if rank == self.src else []) for rank, (outputs, inputs) in enumerate(data)
        ]
        collectives.scatter(arguments, self.src)


class Gather:
    """Copies the tensor of each rank to rank `dst`."""

    def __init__(self, dst: int) -> None:
        self.dst = dst

    @torch.no_grad()
    def work(self, data: Data) -> None:
        arguments = [
            (_only(outputs) if rank == self.dst else [], inputs[0]) for rank, (outputs, inputs) in enumerate(data)
        ]
        collectives.gather(arguments, self.dst)


class ReduceScatter:
    """Reduces the list of tensors over all ranks, and copies one to each rank."""

    def __init__(self, op: Any) -> None:
        collectives.check_reduction(op)
        self.op = op

    @torch.no_grad()
    def work(self, data: Data) -> None:
        collectives.reduce_scatter([(_only(outputs), _only(inputs)) for outputs, inputs in data], self.op)


class Broadcast:
    """Copies the tensors of rank `src` to all ranks."""

    def __init__(self, src: int) -> None:
        self.src = src

    @torch.no_grad()
    def work(self, data: Data) -> None:
        collectives.broadcast([flatten_list(tensors) for tensors in data], self.src)


class AllToAll:
    """Copies one tensor of each rank to each rank."""

    @torch.no_grad()
    def work(self, data: Data) -> None:
        collectives.all_to_all([(list(outputs), list(inputs)) for outputs, inputs in data])


class AllToAllBase:
    """Copies one part of each rank's buffer to each rank; a rank passes buffers, and the sizes of their parts."""

    @torch.no_grad()
    def work(self, data: Data) -> None:
        def split(buffer: torch.Tensor, sizes: Any) -> list[torch.Tensor]:
            return collectives.split(buffer, [int(size) for size in sizes] if sizes is not None else None, len(data))

        collectives.all_to_all(
            [
                (split(output, output_sizes), split(source, input_sizes))
                for output, source, output_sizes, input_sizes in data
            ]
        )
