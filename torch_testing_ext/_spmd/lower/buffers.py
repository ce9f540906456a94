"""Buffers that a step writes, such as running statistics: every rank starts the step with rank 0's, as under DDP."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from ..trace.markers import GRAD_SYNC, SCATTER_GRAD
from ..trace.tracing import InputSource
from ..trace.train_state import StepState
from .buckets import Bucket, CollectiveOptions, aten, c10d, pack, split_by_sizes, wait_for
from .cleaning import placeholders
from .graphs import call, nbytes, storages, writes


def share_written_buffers(
    graph: fx.Graph, sources: list[InputSource], rebound: Iterable[int], state: StepState, options: CollectiveOptions
) -> list[Bucket]:
    """Insert one broadcast of bytes for the buffers that the step writes, and for all buffers if it trains.

    Whatever was written to a buffer since, by other steps or between calls, may differ between ranks.

    rebound: the buffers that the step replaces by new tensors.
    """
    replaced = frozenset(rebound)
    written = set().union(*(writes(node) for node in graph.nodes))
    trains = any(node.target in (GRAD_SYNC, SCATTER_GRAD) for node in graph.nodes)

    def may_differ(node: fx.Node, i: int) -> bool:
        return i in replaced or trains or bool(storages(node) & written)

    found = [
        (node, state.buffers[source.i].name)
        for node, source in zip(placeholders(graph), sources, strict=True)
        if source.kind == "buffer" and may_differ(node, source.i)
    ]
    if not found or options.world == 1:
        return []
    # Widest dtype first: this aligns every buffer in the broadcast to its dtype, so that the bytes can be viewed as it.
    found.sort(key=lambda item: -item[0].meta["val"].element_size())
    nodes = [node for node, _ in found]
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        _broadcast(graph, nodes, options)
    sizes = [nbytes(node.meta["val"]) for node in nodes]
    return [Bucket("broadcast", torch.uint8, names=[name for _, name in found], nbytes=sum(sizes))]


def _broadcast(graph: fx.Graph, nodes: list[fx.Node], options: CollectiveOptions) -> None:
    pieces = []
    for node in nodes:
        flat = call(graph, node, aten.reshape.default, node, [-1])
        pieces.append(call(graph, node, aten.view.dtype, flat, torch.uint8))
    # A single piece shares the buffer's memory, which the collective must not write to.
    flat = pack(graph, pieces, options) if len(pieces) > 1 else call(graph, pieces[0], aten.clone.default, pieces[0])
    target = c10d.broadcast.default if options.compiled else c10d.broadcast_.default
    received = wait_for(graph, call(graph, flat, target, flat, 0, options.group))
    parts = split_by_sizes(graph, received, [nbytes(node.meta["val"]) for node in nodes], 0)
    for node, part in zip(nodes, parts, strict=True):
        value = node.meta["val"]
        same = call(graph, node, aten.view.dtype, part, value.dtype)
        shaped = call(graph, node, aten.reshape.default, same, list(value.shape))
        call(graph, node, aten.copy_.default, node, shaped)
