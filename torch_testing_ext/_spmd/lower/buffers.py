"""Buffers that a step writes, such as running statistics: at its start every rank takes rank 0's, as under DDP."""

from __future__ import annotations

import torch
from torch import fx

from ..trace.state import StepState
from ..trace.tracing import Source
from .buckets import Bucket, Wire, aten, c10d, flatten, split, wait
from .cleaning import placeholders
from .graphs import call, nbytes, storages, writes


def share_written_buffers(graph: fx.Graph, sources: list[Source], state: StepState, wire: Wire) -> list[Bucket]:
    """One broadcast, in bytes, for all of them. Buffers that no step writes never differ."""
    written = set().union(*(writes(node) for node in graph.nodes))
    found = [
        (node, state.buffers[source.i].name)
        for node, source in zip(placeholders(graph), sources, strict=True)
        if source.kind == "buffer" and storages(node) & written
    ]
    if not found or wire.world == 1:
        return []
    # Widest first, so that each begins where its dtype can be viewed.
    found.sort(key=lambda item: -item[0].meta["val"].element_size())
    nodes = [node for node, _ in found]
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        _broadcast(graph, nodes, wire)
    sizes = [nbytes(node.meta["val"]) for node in nodes]
    return [Bucket("broadcast", torch.uint8, names=[name for _, name in found], nbytes=sum(sizes))]


def _broadcast(graph: fx.Graph, nodes: list[fx.Node], wire: Wire) -> None:
    pieces = []
    for node in nodes:
        flat = call(graph, node, aten.reshape.default, node, [-1])
        pieces.append(call(graph, node, aten.view.dtype, flat, torch.uint8))
    # A single piece is the buffer's own memory; the copy keeps the collective off it.
    flat = flatten(graph, pieces, wire) if len(pieces) > 1 else call(graph, pieces[0], aten.clone.default, pieces[0])
    target = c10d.broadcast.default if wire.compiled else c10d.broadcast_.default
    received = wait(graph, call(graph, flat, target, flat, 0, wire.group))
    parts = split(graph, received, [nbytes(node.meta["val"]) for node in nodes], 0)
    for node, part in zip(nodes, parts, strict=True):
        value = node.meta["val"]
        same = call(graph, node, aten.view.dtype, part, value.dtype)
        shaped = call(graph, node, aten.reshape.default, same, list(value.shape))
        call(graph, node, aten.copy_.default, node, shaped)
