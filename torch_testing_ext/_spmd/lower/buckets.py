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

    group: str  # the name of the process group
    world: int
    bucket_bytes: int | None  # the size limit of a bucket; None lets the program choose

    def limit(self, tensors: list[torch.Tensor]) -> int:
        accelerator = any(tensor.device.type != "cpu" for tensor in tensors)
        return self.bucket_bytes or bucket_limit(sum(tensor.nbytes for tensor in tensors), accelerator)


@dataclass
class Bucket:
    """One collective, with the parameters whose data it carries, in order."""

    collective: str
    dtype: torch.dtype
    markers: list[fx.Node] = field(default_factory=list)  # in the recorded graph
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
    return call(graph, aten.cat.default, [call(graph, aten.reshape.default, tensors[0], [-1])])


def is_packed(node: Any) -> bool:
    """Whether this is one flat tensor, as packing makes it, with one user."""
    packing = (aten.flatten_dense_tensors.default, aten.cat.default)
    return isinstance(node, fx.Node) and node.target in packing and len(node.args) == 1 and len(node.users) == 1


def _unpack(graph: fx.Graph, flat: fx.Node, templates: list[fx.Node]) -> list[fx.Node]:
    """Views of `flat` in the shapes of `templates`, which are alive in any case."""
    views = call(graph, aten.unflatten_dense_tensors.default, flat, templates)
    return [call(graph, operator.getitem, views, i) for i in range(len(templates))]


def _split(graph: fx.Graph, tensor: fx.Node, sizes: list[int], dim: int, target: Any) -> list[fx.Node]:
    if len(sizes) == 1:
        return [tensor]
    parts = call(graph, target, tensor, sizes, dim)
    return [call(graph, operator.getitem, parts, i) for i in range(len(sizes))]


def _padded(graph: fx.Graph, rows: fx.Node, layout: Layout) -> fx.Node:
    if layout.even:
        return rows
    missing = layout.chunk - layout.local_shape[0]
    return call(graph, aten.constant_pad_nd.default, rows, [0, 0] * (len(layout.shape) - 1) + [0, missing])


def start_mean(graph: fx.Graph, grads: list[fx.Node], scatter: bool, options: CollectiveOptions) -> fx.Node:
    """Start to average gradients. Like in DDP they are divided first: the same rounding, and no overflow in half."""
    flat = call(graph, aten._chunk_cat.default, grads, 0, options.world) if scatter else _pack(graph, grads)
    flat = call(graph, aten.mul_.Tensor, flat, 1.0 / options.world)
    if scatter:
        return call(graph, c10d.reduce_scatter_tensor.default, flat, "sum", options.world, options.group)
    return call(graph, c10d.all_reduce_.default, flat, "sum", options.group)


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
    parts = _split(graph, flat, [layout.padded_numel for layout in layouts], 0, aten.split_with_sizes.default)
    pieces = [call(graph, aten.view.default, part, [layout.chunk, *layout.shape[1:]])
              for part, layout in zip(parts, layouts, strict=True)]  # fmt: skip
    return [call(graph, aten.slice.Tensor, piece, 0, 0, layout.local_shape[0])
            for piece, layout in zip(pieces, layouts, strict=True)]  # fmt: skip


def start_all_gather(
    graph: fx.Graph, shards: list[fx.Node], layouts: list[Layout], options: CollectiveOptions
) -> fx.Node:
    flat = _pack(graph, [_padded(graph, *pair) for pair in zip(shards, layouts, strict=True)])
    return call(graph, c10d.all_gather_into_tensor.default, flat, options.world, options.group)


def finish_all_gather(graph: fx.Graph, started: fx.Node, layouts: list[Layout], world: int) -> list[fx.Node]:
    flat = call(graph, c10d.wait_tensor.default, started)
    sizes = [layout.padded_numel for layout in layouts]
    rows = call(graph, aten.view.default, flat, [world, sum(sizes)]) if len(sizes) > 1 else flat
    wholes = []
    for part, layout in zip(_split(graph, rows, sizes, 1, aten.split_with_sizes_copy.default), layouts, strict=True):
        whole = call(graph, aten.view.default, part, [layout.chunk * world, *layout.shape[1:]])
        wholes.append(whole if layout.even else call(graph, aten.slice.Tensor, whole, 0, 0, layout.shape[0]))
    return wholes
