"""Buckets: what travels together in one collective, and how it is packed and unpacked.

Two sets of operations do the same: few large ones for the interpreter, plain ones that a compiler can take apart.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import torch
from torch import fx

from ..layout import Layout
from .graphs import call

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


@dataclass
class Wire:
    """How ranks are reached: the group's name and size, the limit of a bucket, for whom the graph is written."""

    group: str
    world: int
    bucket_bytes: int
    compiled: bool


@dataclass
class Bucket:
    """One collective: the parameters whose data it carries, in order."""

    collective: str
    dtype: torch.dtype
    params: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    nbytes: int = 0

    def add(self, param: int, name: str, nbytes: int) -> None:
        self.params.append(param)
        self.names.append(name)
        self.nbytes += nbytes


def flatten(graph: fx.Graph, tensors: list[fx.Node], wire: Wire) -> fx.Node:
    like = tensors[0]
    if not wire.compiled and len(tensors) > 1:
        return call(graph, like, aten.flatten_dense_tensors.default, tensors)
    flat = [call(graph, like, aten.reshape.default, tensor, [-1]) for tensor in tensors]
    return flat[0] if len(flat) == 1 else call(graph, like, aten.cat.default, flat)


def unflatten(
    graph: fx.Graph, flat: fx.Node, shapes: list[torch.Size], templates: list[fx.Node], wire: Wire
) -> list[fx.Node]:
    """Views of `flat`, one for each shape. `templates` are tensors of these shapes that live anyway."""
    if not wire.compiled and len(shapes) > 1:
        views = call(graph, flat, aten.unflatten_dense_tensors.default, flat, templates)
        return [call(graph, flat, operator.getitem, views, i) for i in range(len(shapes))]
    parts = split(graph, flat, [shape.numel() for shape in shapes], 0)
    return [call(graph, flat, aten.view.default, part, list(shape)) for part, shape in zip(parts, shapes, strict=True)]


def split(graph: fx.Graph, tensor: fx.Node, sizes: list[int], dim: int, copy: bool = False) -> list[fx.Node]:
    if len(sizes) == 1:
        return [tensor]
    target = aten.split_with_sizes_copy.default if copy else aten.split_with_sizes.default
    parts = call(graph, tensor, target, tensor, sizes, dim)
    return [call(graph, tensor, operator.getitem, parts, i) for i in range(len(sizes))]


def mean_scaled(graph: fx.Graph, flat: fx.Node, wire: Wire, owned: bool) -> fx.Node:
    """Scaled before the sum, as DDP does: the same roundings, no overflow in half precision."""
    if owned and not wire.compiled:
        return call(graph, flat, aten.mul_.Tensor, flat, 1.0 / wire.world)
    return call(graph, flat, aten.mul.Tensor, flat, 1.0 / wire.world)


def all_reduce(graph: fx.Graph, flat: fx.Node, wire: Wire) -> fx.Node:
    # In place for the interpreter; a compiler reuses the buffer by itself and cannot take the in-place form.
    target = c10d.all_reduce.default if wire.compiled else c10d.all_reduce_.default
    return call(graph, flat, target, flat, "sum", wire.group)


def wait(graph: fx.Graph, node: fx.Node) -> fx.Node:
    return call(graph, node, c10d.wait_tensor.default, node)


def start_all_gather(graph: fx.Graph, shards: list[fx.Node], layouts: list[Layout], wire: Wire) -> fx.Node:
    padded = [_padded(graph, s, at.local_shape, at, 1) for s, at in zip(shards, layouts, strict=True)]
    flat = flatten(graph, padded, wire)
    return call(graph, flat, c10d.all_gather_into_tensor.default, flat, wire.world, wire.group)


def finish_all_gather(graph: fx.Graph, gathered: fx.Node, layouts: list[Layout], wire: Wire) -> list[fx.Node]:
    flat = wait(graph, gathered)
    sizes = [layout.padded_numel for layout in layouts]
    rows = call(graph, flat, aten.view.default, flat, [wire.world, sum(sizes)]) if len(sizes) > 1 else flat
    wholes = []
    for part, layout in zip(split(graph, rows, sizes, 1, copy=not wire.compiled), layouts, strict=True):
        padded_shape = [layout.chunk * wire.world, *layout.shape[1:]]
        whole = call(graph, flat, aten.reshape.default if wire.compiled else aten.view.default, part, padded_shape)
        if not layout.even:
            whole = call(graph, flat, aten.slice.Tensor, whole, 0, 0, layout.shape[0])
        wholes.append(whole)
    return wholes


def start_reduce_scatter(graph: fx.Graph, grads: list[fx.Node], layouts: list[Layout], wire: Wire) -> fx.Node:
    if wire.compiled:
        parts = []
        for grad, layout in zip(grads, layouts, strict=True):
            padded = _padded(graph, grad, layout.shape, layout, wire.world)
            parts.append(call(graph, grad, aten.reshape.default, padded, [wire.world, layout.padded_numel]))
        rows = parts[0] if len(parts) == 1 else call(graph, grads[0], aten.cat.default, parts, 1)
    else:
        rows = call(graph, grads[0], aten._chunk_cat.default, grads, 0, wire.world)
    rows = mean_scaled(graph, rows, wire, owned=True)
    return call(graph, rows, c10d.reduce_scatter_tensor.default, rows, "sum", wire.world, wire.group)


def finish_reduce_scatter(
    graph: fx.Graph, scattered: fx.Node, layouts: list[Layout], shards: list[fx.Node], wire: Wire
) -> list[fx.Node]:
    flat = wait(graph, scattered)
    flat = call(graph, flat, aten.view.default, flat, [-1])
    if all(layout.even for layout in layouts):
        return unflatten(graph, flat, [layout.local_shape for layout in layouts], shards, wire)
    pieces = []
    for part, layout in zip(split(graph, flat, [at.padded_numel for at in layouts], 0), layouts, strict=True):
        piece = call(graph, part, aten.view.default, part, [layout.chunk, *layout.shape[1:]])
        rows = layout.local_shape[0]
        pieces.append(call(graph, part, aten.slice.Tensor, piece, 0, 0, rows))
    return pieces


def _padded(graph: fx.Graph, tensor: fx.Node, shape: torch.Size, layout: Layout, chunks: int) -> fx.Node:
    """`tensor`, rows of zeros added at its end until there are as many as in `chunks` full shards."""
    if layout.even:
        return tensor
    missing = layout.chunk * chunks - shape[0]
    return call(graph, tensor, aten.constant_pad_nd.default, tensor, [0, 0] * (len(shape) - 1) + [0, missing])
