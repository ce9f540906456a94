"""Gradients that a program writes directly to their bucket, instead of to a tensor that is copied to it.

A bucket begins with its large gradients. The operation that computes one of them writes to a view of the bucket if
nothing else uses its result; otherwise the copy to the bucket also divides by the number of ranks, as in DDP. Fewer
passes over memory, and no memory that each step has to get from the system: that costs more than the copies.
"""

import itertools
import operator
from typing import Any

import torch
from torch import fx

from .buckets import aten, c10d, is_packed
from .graphs import call, operand

_LARGE = 16 << 10  # bytes; below, the views cost more than a copy
_ALIGNMENT = 64  # bytes; like a tensor of its own, so that kernels compute it in the same way
_WITH_OUT: dict[Any, Any] = {
    getattr(getattr(aten, name), form): getattr(aten, name).out
    for name, form in (("mm", "default"), ("bmm", "default"), ("add", "Tensor"), ("mul", "Tensor"))
}
_SAME_MEMORY = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def is_large(grad: torch.Tensor) -> bool:
    return grad.device.type == "cpu" and grad.nbytes >= _LARGE and grad.nbytes % _ALIGNMENT == 0


def write_to_buckets(module: fx.GraphModule) -> None:
    """Change `module` in place, so that large gradients are not copied to their buckets."""
    for node in list(module.graph.nodes):
        if node.target is c10d.all_reduce_.default:
            scaled = operand(node)
            if scaled.target is aten.mul_.Tensor and len(scaled.users) == 1 and is_packed(scaled.args[0]):
                _write_to_bucket(module.graph, node, scaled)
    module.recompile()


def _write_to_bucket(graph: fx.Graph, reduce: fx.Node, scaled: fx.Node) -> None:
    packed, factor = operand(scaled), scaled.args[1]
    tensors: list[Any] = list(packed.args[0])  # type: ignore[arg-type]
    bucket: torch.Tensor = packed.meta["val"]
    large = [*itertools.takewhile(lambda tensor: is_large(tensor.meta["val"]), tensors)]
    if not large:
        return
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
                call(graph, _WITH_OUT[source.target], *source.args, **source.kwargs, out=view)
                call(graph, aten.mul_.Tensor, place, factor)  # while it is in the processor's cache
            else:
                call(graph, aten.mul.out, tensor, factor, out=view)
    if rest:
        with graph.inserting_before(packed):
            small = call(graph, aten.flatten_dense_tensors.default, tensors[len(large) :])
            call(graph, aten.mul.out, small, factor, out=places[-1])
    reduce.replace_input_with(scaled, flat)
    for node in (scaled, packed, *itertools.chain.from_iterable(chains)):
        graph.erase_node(node)


def _chain(tensor: fx.Node, packed: fx.Node, tensors: list[fx.Node]) -> list[fx.Node]:
    """`tensor`, the views that it is of, and the operation that can write to the bucket instead, if it may."""
    chain, user = [tensor], packed
    while tensors.count(tensor) == 1:
        node = chain[-1]
        if {*node.users} != {user} or not node.meta["val"].is_contiguous():
            break
        if node.target in _WITH_OUT:
            return chain
        if node.target not in _SAME_MEMORY:
            break
        user = node
        chain.append(operand(node))
    return []
