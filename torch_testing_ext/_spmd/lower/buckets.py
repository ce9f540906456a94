"""Buckets: the tensors that share one collective, and the operations that pack and unpack them."""

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..engine.bucket_plan import bucket_limit
from ..param_layout import Layout
from .graphs import call, param_of

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


@dataclass
class CollectiveOptions:
    """The options that all collectives of a program share."""

    # The name of the process group.
    group: str
    world: int
    # The size limit of a bucket; None lets the program choose.
    bucket_bytes: int | None

    def limit(self, tensors: list[torch.Tensor]) -> int:
        """The largest size of a bucket of these tensors."""
        if self.bucket_bytes:
            return self.bucket_bytes
        has_accelerator = any(tensor.device.type != "cpu" for tensor in tensors)
        nbytes = sum(tensor.nbytes for tensor in tensors)
        return bucket_limit(nbytes, has_accelerator)


@dataclass
class Bucket:
    """One collective, with the parameters whose data it carries, in order."""

    collective: str
    dtype: torch.dtype
    # In the recorded graph.
    markers: list[fx.Node] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    nbytes: int = 0
    started: fx.Node | None = None

    @property
    def params(self) -> list[int]:
        return [*map(param_of, self.markers)]

    def add(self, marker: fx.Node, names: list[str], nbytes: int) -> None:
        self.markers.append(marker)
        self.names.append(names[param_of(marker)])
        self.nbytes += nbytes


def _pack(graph: fx.Graph, tensors: list[fx.Node]) -> fx.Node:
    if len(tensors) > 1:
        return call(graph, aten.flatten_dense_tensors.default, tensors)
    flat = call(graph, aten.reshape.default, tensors[0], [-1])
    return call(graph, aten.cat.default, [flat])


def is_packed(node: Any) -> bool:
    """Is this one flat tensor, as packing makes it, with one user?"""
    if not isinstance(node, fx.Node) or len(node.users) != 1:
        return False
    return node.target in (aten.flatten_dense_tensors.default, aten.cat.default) and len(node.args) == 1


def _unpack(graph: fx.Graph, flat: fx.Node, templates: list[fx.Node]) -> list[fx.Node]:
    """Views of `flat` in the shapes of `templates`, which are alive in any case."""
    views = call(graph, aten.unflatten_dense_tensors.default, flat, templates)
    return _items(graph, views, len(templates))


def _items(graph: fx.Graph, tensors: fx.Node, count: int) -> list[fx.Node]:
    return [call(graph, operator.getitem, tensors, number) for number in range(count)]


def _split(graph: fx.Graph, tensor: fx.Node, sizes: list[int], dim: int, target: Any) -> list[fx.Node]:
    if len(sizes) == 1:
        return [tensor]
    parts = call(graph, target, tensor, sizes, dim)
    return _items(graph, parts, len(sizes))


def _padded(graph: fx.Graph, rows: fx.Node, layout: Layout) -> fx.Node:
    if layout.even:
        return rows
    # Two numbers for each dimension, the last one first.
    of_other_dimensions = [0, 0] * (len(layout.shape) - 1)
    missing = layout.chunk - layout.local_shape[0]
    return call(graph, aten.constant_pad_nd.default, rows, [*of_other_dimensions, 0, missing])


def start_mean(graph: fx.Graph, grads: list[fx.Node], scatter: bool, options: CollectiveOptions) -> fx.Node:
    """Start to average gradients. Like in DDP they are divided first: the same rounding, and no overflow in half."""
    factor = 1.0 / options.world
    if scatter:
        flat = call(graph, aten._chunk_cat.default, grads, 0, options.world)
        scaled = call(graph, aten.mul_.Tensor, flat, factor)
        return call(graph, c10d.reduce_scatter_tensor.default, scaled, "sum", options.world, options.group)
    scaled = call(graph, aten.mul_.Tensor, _pack(graph, grads), factor)
    return call(graph, c10d.all_reduce_.default, scaled, "sum", options.group)


def finish_mean(
    graph: fx.Graph, started: fx.Node, layouts: list[Layout], params: list[fx.Node], scatter: bool
) -> list[fx.Node]:
    """Wait, and return the mean gradients, or this rank's rows of them. `params` have their shapes."""
    flat = call(graph, c10d.wait_tensor.default, started)
    if not scatter:
        return _unpack(graph, flat, params)
    flat = call(graph, aten.view.default, flat, [-1])
    if all(layout.even for layout in layouts):
        return _unpack(graph, flat, params)
    sizes = [layout.padded_numel for layout in layouts]
    parts = _split(graph, flat, sizes, 0, aten.split_with_sizes.default)
    padded = []
    for part, layout in zip(parts, layouts, strict=True):
        padded.append(call(graph, aten.view.default, part, [layout.chunk, *layout.shape[1:]]))
    rows = []
    for part, layout in zip(padded, layouts, strict=True):
        rows.append(call(graph, aten.slice.Tensor, part, 0, 0, layout.local_shape[0]))
    return rows


def start_all_gather(
    graph: fx.Graph, shards: list[fx.Node], layouts: list[Layout], options: CollectiveOptions
) -> fx.Node:
    padded = [_padded(graph, shard, layout) for shard, layout in zip(shards, layouts, strict=True)]
    flat = _pack(graph, padded)
    return call(graph, c10d.all_gather_into_tensor.default, flat, options.world, options.group)


def finish_all_gather(graph: fx.Graph, started: fx.Node, layouts: list[Layout], world: int) -> list[fx.Node]:
    flat = call(graph, c10d.wait_tensor.default, started)
    sizes = [layout.padded_numel for layout in layouts]
    # With a row for each rank.
    rows = call(graph, aten.view.default, flat, [world, sum(sizes)]) if len(sizes) > 1 else flat
    parts = _split(graph, rows, sizes, 1, aten.split_with_sizes_copy.default)
    wholes = []
    for part, layout in zip(parts, layouts, strict=True):
        whole = call(graph, aten.view.default, part, [layout.chunk * world, *layout.shape[1:]])
        if not layout.even:
            whole = call(graph, aten.slice.Tensor, whole, 0, 0, layout.shape[0])
        wholes.append(whole)
    return wholes
