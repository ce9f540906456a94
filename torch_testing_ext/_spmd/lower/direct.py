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

# In bytes; below, the views cost more than a copy.
_LARGE = 16 << 10
# In bytes; like a tensor of its own, so that kernels compute it in the same way.
_ALIGNMENT = 64
_WITH_OUT: dict[Any, Any] = {
    aten.mm.default: aten.mm.out,
    aten.bmm.default: aten.bmm.out,
    aten.add.Tensor: aten.add.out,
    aten.mul.Tensor: aten.mul.out,
}
_SAME_MEMORY = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def is_large(grad: torch.Tensor) -> bool:
    return grad.device.type == "cpu" and grad.nbytes >= _LARGE and grad.nbytes % _ALIGNMENT == 0


def write_to_buckets(module: fx.GraphModule) -> None:
    """Change `module` in place, so that large gradients are not copied to their buckets."""
    for node in list(module.graph.nodes):
        if node.target is not c10d.all_reduce_.default:
            continue
        scaled = operand(node)
        if scaled.target is aten.mul_.Tensor and len(scaled.users) == 1 and is_packed(scaled.args[0]):
            _DirectBucket(module.graph, node, scaled).rewrite()
    module.recompile()


class _DirectBucket:
    """A bucket whose large gradients are written to it directly: `packed`, `scaled` and then reduced until now."""

    def __init__(self, graph: fx.Graph, reduce: fx.Node, scaled: fx.Node):
        self.graph = graph
        self.reduce = reduce
        self.scaled = scaled
        self.factor = scaled.args[1]
        self.packed = operand(scaled)
        self.tensors: list[Any] = list(self.packed.args[0])  # type: ignore[arg-type]
        self.large = list(itertools.takewhile(lambda tensor: is_large(tensor.meta["val"]), self.tensors))
        # Of each large gradient: what computes it, if that can write to the bucket.
        self.chains = [_chain(tensor, self.packed, self.tensors) for tensor in self.large]

    def rewrite(self) -> None:
        """Replace the packing in the graph."""
        if not self.large:
            return
        flat, places = self._make_bucket()
        for tensor, chain, place in zip(self.large, self.chains, places, strict=False):
            if chain:
                self._write_directly(chain[-1], place)
            else:
                self._write_scaled(tensor, place)
        small = self.tensors[len(self.large) :]
        if len(places) > len(self.large):
            with self.graph.inserting_before(self.packed):
                rest = call(self.graph, aten.flatten_dense_tensors.default, small)
                call(self.graph, aten.mul.out, rest, self.factor, out=places[-1])
        self.reduce.replace_input_with(self.scaled, flat)
        for node in (self.scaled, self.packed, *itertools.chain.from_iterable(self.chains)):
            self.graph.erase_node(node)

    def _make_bucket(self) -> tuple[fx.Node, list[fx.Node]]:
        """The bucket, before the first node that writes to it, and its parts: large gradients, and all small ones."""
        bucket: torch.Tensor = self.packed.meta["val"]
        sizes = [tensor.meta["val"].numel() for tensor in self.large]
        rest = bucket.numel() - sum(sizes)
        if rest:
            sizes.append(rest)
        position = {node: number for number, node in enumerate(self.graph.nodes)}
        writers = [self.packed, *(chain[-1] for chain in self.chains if chain)]
        first = min(writers, key=position.__getitem__)
        with self.graph.inserting_before(first):
            like = next(arg for arg in first.all_input_nodes if isinstance(arg.meta.get("val"), torch.Tensor))
            flat = call(self.graph, aten.new_empty.default, like, list(bucket.shape), dtype=bucket.dtype)
            # Later nodes have this storage.
            flat.meta["val"] = bucket
            parts = call(self.graph, aten.split_with_sizes.default, flat, sizes)
            places = [call(self.graph, operator.getitem, parts, number) for number in range(len(sizes))]
        return flat, places

    def _write_directly(self, source: fx.Node, place: fx.Node) -> None:
        """Let the operation that computes a gradient write to its place, and divide there: it is still in the cache."""
        with self.graph.inserting_before(source):
            view = call(self.graph, aten.view.default, place, list(source.meta["val"].shape))
            call(self.graph, _WITH_OUT[source.target], *source.args, **source.kwargs, out=view)
            call(self.graph, aten.mul_.Tensor, place, self.factor)

    def _write_scaled(self, tensor: fx.Node, place: fx.Node) -> None:
        """Copy a gradient to its place and divide it, in one pass."""
        with self.graph.inserting_before(self.packed):
            view = call(self.graph, aten.view.default, place, list(tensor.meta["val"].shape))
            call(self.graph, aten.mul.out, tensor, self.factor, out=view)


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
