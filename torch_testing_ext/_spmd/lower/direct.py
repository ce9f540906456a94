"""Gradients that the interpreter writes directly to their bucket, instead of to a tensor that is copied to it.

A bucket begins with its large gradients. The operation that computes one of them writes to a view of the bucket if
nothing else uses its result; otherwise the copy to the bucket also divides by the number of ranks, as in DDP. Fewer
passes over memory, and no memory that each step has to get from the system: that costs more than the copies.
"""

from __future__ import annotations

import itertools
import operator
from typing import Any

import torch
from torch import fx

from .buckets import aten, c10d, is_packed
from .graphs import call, nbytes, operand

_LARGE = 16 << 10  # bytes; below, the views cost more than a copy
_ALIGNMENT = 64  # bytes; like a tensor of its own, so that kernels compute it in the same way
_WITH_OUT = {
    aten.mm.default: aten.mm.out,
    aten.bmm.default: aten.bmm.out,
    aten.add.Tensor: aten.add.out,
    aten.mul.Tensor: aten.mul.out,
}
_SAME_MEMORY = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def is_large(grad: torch.Tensor) -> bool:
    """Whether a gradient has a place of its own in its bucket."""
    size = nbytes(grad)
    return grad.device.type == "cpu" and size >= _LARGE and size % _ALIGNMENT == 0


def write_to_buckets(module: fx.GraphModule) -> None:
    """Change `module` in place, so that large gradients are not copied to their buckets."""
    changed = [_write_to_bucket(module.graph, n) for n in list(module.graph.nodes) if _is_average(n)]
    if any(changed):
        module.graph.lint()
        module.recompile()


def _is_average(node: fx.Node) -> bool:
    """Whether `node` starts to reduce a packed tensor, scaled in place, that nothing else uses."""
    if node.target is not c10d.all_reduce_.default:
        return False
    scaled: Any = node.args[0]
    if scaled.target is not aten.mul_.Tensor or len(scaled.users) != 1 or not isinstance(scaled.args[1], float):
        return False
    return is_packed(operand(scaled))


def _write_to_bucket(graph: fx.Graph, reduce: fx.Node) -> bool:
    scaled: Any = reduce.args[0]
    packed, factor = operand(scaled), scaled.args[1]
    tensors: list[Any] = list(packed.args[0])  # type: ignore[arg-type]
    bucket: torch.Tensor = packed.meta["val"]
    large = [*itertools.takewhile(lambda tensor: _has_place(tensor, bucket), tensors)]
    small = tensors[len(large) :]
    if not large:
        return False
    chains = [_chain(tensor, packed, tensors) for tensor in large]
    position = {node: i for i, node in enumerate(graph.nodes)}
    first = min([packed, *(chain[-1] for chain in chains if chain)], key=position.__getitem__)
    sizes = [tensor.meta["val"].numel() for tensor in large]
    rest = bucket.numel() - sum(sizes)
    with graph.inserting_before(first):
        like = next(arg for arg in first.all_input_nodes if isinstance(arg.meta.get("val"), torch.Tensor))
        flat = call(graph, aten.new_empty.default, like, list(bucket.shape), dtype=bucket.dtype)
        flat.meta["val"] = bucket  # later nodes have this storage
        parts = call(graph, aten.split_with_sizes.default, flat, [*sizes, rest] if rest else sizes)
        places = [call(graph, operator.getitem, parts, i) for i in range(len(large) + bool(rest))]
    for tensor, chain, place in zip(large, chains, places, strict=False):
        source = chain[-1] if chain else tensor
        with graph.inserting_before(source if chain else packed):
            view = call(graph, aten.view.default, place, list(source.meta["val"].shape))
            if chain:
                target: Any = source.target
                call(graph, _WITH_OUT[target], *source.args, **source.kwargs, out=view)
                call(graph, aten.mul_.Tensor, place, factor)  # while it is in the processor's cache
            else:
                call(graph, aten.mul.out, tensor, factor, out=view)
    if small:
        with graph.inserting_before(packed):
            flatten = aten.flatten_dense_tensors.default
            one = call(graph, flatten, small)
            call(graph, aten.mul.out, one, factor, out=places[-1])
    reduce.replace_input_with(scaled, flat)
    for node in (scaled, packed, *itertools.chain.from_iterable(chains)):
        graph.erase_node(node)
    return True


def _has_place(tensor: fx.Node, bucket: torch.Tensor) -> bool:
    value = tensor.meta["val"]
    return is_large(value) and value.dtype == bucket.dtype and all(isinstance(size, int) for size in value.shape)


def _chain(tensor: fx.Node, packed: fx.Node, tensors: list[fx.Node]) -> list[fx.Node]:
    """`tensor`, the views that it is of, and the operation that can write to the bucket instead, if it may."""
    chain, user = [tensor], packed
    if tensors.count(tensor) > 1:
        return []
    while True:
        node = chain[-1]
        if {*node.users} != {user} or not node.meta["val"].is_contiguous():
            return []
        if node.target in _WITH_OUT:
            return chain
        if node.target not in _SAME_MEMORY:
            return []
        user = node
        chain.append(operand(node))
