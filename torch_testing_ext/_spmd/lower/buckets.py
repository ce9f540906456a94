"""Buckets: the tensors that share one collective, and the operations that pack and unpack them.

Each task has two sets of operations: a few large ones for the interpreter, and plain ones that inductor can fuse.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..param_layout import Layout
from .graphs import call

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

# Limits in bytes of a bucket that the program chooses. The C library gives larger blocks of memory back to the system,
# and each step would have to get them again.
_SMALLEST, _LARGEST, _LARGEST_ON_ACCELERATOR = 1 << 20, 8 << 20, 25 << 20


@dataclass
class CollectiveOptions:
    """The options that all collectives of a program share."""

    group: str  # the name of the process group
    world: int
    bucket_bytes: int | None  # the size limit of a bucket; None lets the program choose
    compiled: bool  # whether inductor compiles the graph
    reshard: bool  # whether backward gathers parameters again: memory matters more than the number of collectives

    def limit(self, tensors: list[torch.Tensor]) -> int:
        """The size limit of buckets that `tensors` go to.

        Collectives overlap with computation only if there are several; more of them than needed cost time.
        """
        if self.bucket_bytes is not None:
            return self.bucket_bytes
        total = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        largest = _LARGEST if all(tensor.device.type == "cpu" for tensor in tensors) else _LARGEST_ON_ACCELERATOR
        if self.reshard:
            return min(-(-total // 12), largest)
        return min(max(total // 4, _SMALLEST), largest)


@dataclass
class Bucket:
    """One collective, with the parameters whose data it carries, in order."""

    collective: str
    dtype: torch.dtype
    params: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    nbytes: int = 0

    def add(self, param: int, name: str, nbytes: int) -> None:
        self.params.append(param)
        self.names.append(name)
        self.nbytes += nbytes


def pack(graph: fx.Graph, tensors: list[fx.Node], options: CollectiveOptions) -> fx.Node:
    """Concatenate `tensors` into one flat tensor."""
    like = tensors[0]
    if not options.compiled and len(tensors) > 1:
        return call(graph, like, aten.flatten_dense_tensors.default, tensors)
    flat = [call(graph, like, aten.reshape.default, tensor, [-1]) for tensor in tensors]
    return flat[0] if len(flat) == 1 else call(graph, like, aten.cat.default, flat)


def is_packed(node: Any) -> bool:
    """Whether this is one flat tensor for the interpreter, as `pack` or `pack_gradients` makes it, with one user."""
    packing = (aten.flatten_dense_tensors.default, aten.cat.default)
    return isinstance(node, fx.Node) and node.target in packing and len(node.args) == 1 and len(node.users) == 1


def pack_gradients(graph: fx.Graph, grads: list[fx.Node], options: CollectiveOptions) -> fx.Node:
    """Concatenate `grads` into one flat tensor that the program may write to; for inductor, one is not copied."""
    if options.compiled or len(grads) > 1:
        return pack(graph, grads, options)
    flat = call(graph, grads[0], aten.reshape.default, grads[0], [-1])
    return call(graph, flat, aten.cat.default, [flat])


def unpack(
    graph: fx.Graph, flat: fx.Node, shapes: list[torch.Size], templates: list[fx.Node], options: CollectiveOptions
) -> list[fx.Node]:
    """Views of `flat`, one for each shape. `templates` are tensors of these shapes that are alive in any case."""
    if not options.compiled:
        views = call(graph, flat, aten.unflatten_dense_tensors.default, flat, templates)
        return [call(graph, flat, operator.getitem, views, i) for i in range(len(shapes))]
    parts = split_by_sizes(graph, flat, [shape.numel() for shape in shapes], 0)
    return [call(graph, flat, aten.view.default, part, list(shape)) for part, shape in zip(parts, shapes, strict=True)]


def split_by_sizes(graph: fx.Graph, tensor: fx.Node, sizes: list[int], dim: int, copy: bool = False) -> list[fx.Node]:
    """Split `tensor` into parts of the given sizes: views, or copies if `copy`."""
    if len(sizes) == 1:
        return [tensor]
    target = aten.split_with_sizes_copy.default if copy else aten.split_with_sizes.default
    parts = call(graph, tensor, target, tensor, sizes, dim)
    return [call(graph, tensor, operator.getitem, parts, i) for i in range(len(sizes))]


def mean_scaled(graph: fx.Graph, flat: fx.Node, options: CollectiveOptions, owned: bool) -> fx.Node:
    """Divide `flat` by the number of ranks, in place if `owned`.

    Like in DDP this comes before the sum: the same rounding, and no overflow in half precision.
    """
    if owned and not options.compiled:
        return call(graph, flat, aten.mul_.Tensor, flat, 1.0 / options.world)
    return call(graph, flat, aten.mul.Tensor, flat, 1.0 / options.world)


def start_all_reduce(graph: fx.Graph, flat: fx.Node, options: CollectiveOptions) -> fx.Node:
    # In place for the interpreter; inductor reuses the buffer by itself and does not support the in-place form.
    target = c10d.all_reduce.default if options.compiled else c10d.all_reduce_.default
    return call(graph, flat, target, flat, "sum", options.group)


def wait_for(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The result of the collective `node`, once complete."""
    return call(graph, node, c10d.wait_tensor.default, node)


def start_all_gather(
    graph: fx.Graph, shards: list[fx.Node], layouts: list[Layout], options: CollectiveOptions
) -> fx.Node:
    """Start to gather the whole parameters from `shards`, in one collective."""
    padded = [
        _padded(graph, shard, layout.local_shape, layout, 1) for shard, layout in zip(shards, layouts, strict=True)
    ]
    flat = pack(graph, padded, options)
    return call(graph, flat, c10d.all_gather_into_tensor.default, flat, options.world, options.group)


def finish_all_gather(
    graph: fx.Graph, gathered: fx.Node, layouts: list[Layout], options: CollectiveOptions
) -> list[fx.Node]:
    """Wait for an all_gather, and return the whole parameters."""
    flat = wait_for(graph, gathered)
    sizes = [layout.padded_numel for layout in layouts]
    rows = call(graph, flat, aten.view.default, flat, [options.world, sum(sizes)]) if len(sizes) > 1 else flat
    wholes = []
    for part, layout in zip(split_by_sizes(graph, rows, sizes, 1, copy=not options.compiled), layouts, strict=True):
        padded_shape = [layout.chunk * options.world, *layout.shape[1:]]
        whole = call(graph, flat, aten.reshape.default if options.compiled else aten.view.default, part, padded_shape)
        if not layout.even:
            whole = call(graph, flat, aten.slice.Tensor, whole, 0, 0, layout.shape[0])
        wholes.append(whole)
    return wholes


def start_reduce_scatter(
    graph: fx.Graph, grads: list[fx.Node], layouts: list[Layout], options: CollectiveOptions
) -> fx.Node:
    """Start to average whole gradients and scatter them to the shards, in one collective."""
    if options.compiled:
        parts = []
        for grad, layout in zip(grads, layouts, strict=True):
            padded = _padded(graph, grad, layout.shape, layout, options.world)
            parts.append(call(graph, grad, aten.reshape.default, padded, [options.world, layout.padded_numel]))
        rows = parts[0] if len(parts) == 1 else call(graph, grads[0], aten.cat.default, parts, 1)
    else:
        rows = call(graph, grads[0], aten._chunk_cat.default, grads, 0, options.world)
    rows = mean_scaled(graph, rows, options, owned=True)
    return call(graph, rows, c10d.reduce_scatter_tensor.default, rows, "sum", options.world, options.group)


def finish_reduce_scatter(
    graph: fx.Graph, scattered: fx.Node, layouts: list[Layout], shards: list[fx.Node], options: CollectiveOptions
) -> list[fx.Node]:
    """Wait for a reduce_scatter, and return this rank's parts of the mean gradients."""
    flat = wait_for(graph, scattered)
    flat = call(graph, flat, aten.view.default, flat, [-1])
    if all(layout.even for layout in layouts):
        return unpack(graph, flat, [layout.local_shape for layout in layouts], shards, options)
    pieces = []
    for part, layout in zip(
        split_by_sizes(graph, flat, [layout.padded_numel for layout in layouts], 0), layouts, strict=True
    ):
        piece = call(graph, part, aten.view.default, part, [layout.chunk, *layout.shape[1:]])
        rows = layout.local_shape[0]
        pieces.append(call(graph, part, aten.slice.Tensor, piece, 0, 0, rows))
    return pieces


def _padded(graph: fx.Graph, tensor: fx.Node, shape: torch.Size, layout: Layout, chunks: int) -> fx.Node:
    """`tensor`, padded with rows of zeros to the number of rows of `chunks` full shards."""
    if layout.even:
        return tensor
    missing = layout.chunk * chunks - shape[0]
    return call(graph, tensor, aten.constant_pad_nd.default, tensor, [0, 0] * (len(shape) - 1) + [0, missing])
