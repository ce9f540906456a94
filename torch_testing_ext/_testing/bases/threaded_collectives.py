"""The effect of each collective on the tensors of all ranks, once they are in one place: pure, except for outputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from torch_testing_ext._torch.tensors.nested_tensors import tensors_in

_Reduction = Callable[[list[Tensor]], Tensor]


def _stacked(reduce: Callable[[Tensor], Tensor]) -> _Reduction:
    return lambda tensors: reduce(torch.stack(tensors))


def _pairwise(reduce: Callable[[Tensor, Tensor], Tensor]) -> _Reduction:
    return lambda tensors: functools.reduce(reduce, tensors)


_REDUCTIONS: dict[Any, _Reduction] = {
    ReduceOp.SUM: _stacked(lambda stack: stack.sum(0)),
    ReduceOp.AVG: _stacked(lambda stack: stack.mean(0)),
    ReduceOp.PRODUCT: _stacked(lambda stack: stack.prod(0)),
    ReduceOp.MIN: _stacked(lambda stack: stack.amin(0)),
    ReduceOp.MAX: _stacked(lambda stack: stack.amax(0)),
    ReduceOp.BAND: _pairwise(torch.bitwise_and),
    ReduceOp.BOR: _pairwise(torch.bitwise_or),
    ReduceOp.BXOR: _pairwise(torch.bitwise_xor),
}


def _reduced(tensors: Sequence[Tensor], op: Any) -> Tensor:
    """Reduce on the device of the first tensor."""
    kind = getattr(op, "op", op)
    device = tensors[0].device
    on_device = [tensor.detach().to(device) for tensor in tensors]
    if kind == ReduceOp.PREMUL_SUM:
        scaled = [tensor * op.factor for tensor in on_device]
        return torch.stack(scaled).sum(0)
    if kind not in _REDUCTIONS:
        known = ", ".join(str(known) for known in _REDUCTIONS)
        raise NotImplementedError(f"threads cannot reduce by {kind}, only by {known}")
    return _REDUCTIONS[kind](on_device)


def _write(output: Tensor, source: Tensor) -> None:
    # Not copy_ alone, which would silently broadcast to an output of another size.
    output.detach().copy_(source.detach().reshape(output.shape))


def all_reduce(arguments: list[list[Tensor]], op: Any) -> None:
    for tensors in zip(*arguments, strict=True):
        result = _reduced(tensors, op)
        for tensor in tensors:
            _write(tensor, result)


def reduce(arguments: list[list[Tensor]], op: Any, root: int) -> None:
    for tensors in zip(*arguments, strict=True):
        result = _reduced(tensors, op)
        _write(tensors[root], result)


def broadcast(arguments: list[list[Tensor]], root: int) -> None:
    for tensors in zip(*arguments, strict=True):
        source = tensors[root]
        for tensor in tensors:
            if tensor is not source:
                _write(tensor, source)


def all_gather(arguments: list[tuple[list[Tensor], Tensor]]) -> None:
    """A rank passes an output for each rank's tensor, and its own tensor."""
    for outputs, _ in arguments:
        for output, (_, tensor) in zip(outputs, arguments, strict=True):
            _write(output, tensor)


def gather(arguments: list[tuple[list[Tensor], Tensor]], root: int) -> None:
    """A rank passes outputs (at the root only) and its own tensor."""
    outputs, _ = arguments[root]
    for output, (_, tensor) in zip(outputs, arguments, strict=True):
        _write(output, tensor)


def scatter(arguments: list[tuple[Tensor, list[Tensor]]], root: int) -> None:
    """A rank passes its output, and a tensor for each rank (at the root only)."""
    _, tensors = arguments[root]
    for (output, _), tensor in zip(arguments, tensors, strict=True):
        _write(output, tensor)


def reduce_scatter(arguments: list[tuple[Tensor, list[Tensor]]], op: Any) -> None:
    """A rank passes its output, and a tensor for each rank."""
    outputs = [output for output, _ in arguments]
    inputs = [tensors for _, tensors in arguments]
    # Compute all results first: an output may be part of an input.
    results = [_reduced(tensors, op) for tensors in zip(*inputs, strict=True)]
    for output, result in zip(outputs, results, strict=True):
        _write(output, result)


def all_to_all(arguments: list[tuple[list[Tensor], list[Tensor]]]) -> None:
    """A rank passes an output for each rank's tensor, and a tensor for each rank."""
    for receiver, (outputs, _) in enumerate(arguments):
        for output, (_, tensors) in zip(outputs, arguments, strict=True):
            _write(output, tensors[receiver])


def split(tensor: Tensor, sizes: Sequence[int] | Tensor | None, count: int) -> list[Tensor]:
    """Split a buffer along dim 0 into one part for each rank: of these sizes, or of equal ones."""
    # `split` is untyped in torch.
    flat: Any = tensor.detach()
    parts = [] if sizes is None else [int(size) for size in sizes]
    if parts:
        return list(flat.split(parts))
    return list(flat.tensor_split(count))


@dataclass(frozen=True)
class CallOptions:
    """Further properties in which the ranks must agree: the root, and the others only in a sanitized collective.

    `exchange`: of an all_to_all, the elements to and from each member.
    """

    root: int | None = None
    op: str | None = None
    exchange: tuple[tuple[int, ...], ...] | None = None
    is_sanitized: bool = False

    def details(self) -> tuple[str, ...]:
        """The operation and the root in words. Otherwise, a root is told only where roots differ."""
        root = f"root {self.root}" if self.is_sanitized and self.root is not None else ""
        return tuple(filter(None, (self.op, root)))


def options_of(kind: str, arguments: Any, options: Mapping[str, Any], is_sanitized: bool) -> CallOptions:
    root = options.get("root")
    if not is_sanitized:
        return CallOptions(root)
    exchange = None
    if kind == "all_to_all":
        outputs, inputs = arguments
        exchange = tuple(tuple(tensor.numel() for tensor in side) for side in (inputs, outputs))
    return CallOptions(root, name_of_op(options), exchange, is_sanitized=True)


def name_of_op(options: Mapping[str, Any]) -> str | None:
    """The reduce operation of a collective."""
    op = options.get("op")
    if op is None:
        return None
    kind = str(getattr(op, "op", op))
    return kind.rpartition(".")[2].lower()


def written_and_read(
    rank: int, kind: str, arguments: Any, options: Mapping[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that a collective writes in this rank of the group, and those that it reads: perhaps the same."""
    if isinstance(arguments, tuple) and arguments:
        outputs, inputs = arguments
        return list(tensors_in(outputs)), list(tensors_in(inputs))
    tensors = list(tensors_in(arguments))
    if kind != "broadcast":
        return tensors, tensors
    if options.get("root") == rank:
        return [], tensors
    return tensors, []


def finish_on_device(arguments: Any) -> None:
    """Streams belong to threads: work that one has queued on a tensor must end before another touches the tensor."""
    devices = {tensor.device for tensor in tensors_in(arguments)}
    for device in devices:
        if device.type not in ("cpu", "meta"):
            torch.accelerator.current_stream(device).synchronize()
