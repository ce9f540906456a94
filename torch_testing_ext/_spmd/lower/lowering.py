"""Lowering of a recorded step to the program that every rank runs: its markers become bucketed collectives."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from ..param_layout import Layout
from .buckets import Bucket, CollectiveOptions
from .cleaning import lasting_storages, remove_dead_code
from .gathers import lower_gathers
from .graphs import is_collective, placeholders, storages, writes
from .schedule import schedule_gradients


@dataclass
class LoweredGraph:
    """A graph with collectives.

    number: what ranks compare before they run it. 0: the program neither communicates nor changes what they share.
    changes_early: whether it changes something before its first collective.
    """

    module: fx.GraphModule
    buckets: list[Bucket]
    number: int = 0
    changes_early: bool = False


def lower(module: fx.GraphModule, layouts: list[Layout], names: list[str], options: CollectiveOptions) -> LoweredGraph:
    """Lower a clean graph, which is consumed."""
    buckets: list[Bucket] = []
    if any(layout.sharded for layout in layouts):
        buckets = lower_gathers(module.graph, layouts, names, options)
    new, reductions = schedule_gradients(module.graph, layouts, names, options)
    remove_dead_code(new)
    new.lint()
    return LoweredGraph(fx.GraphModule(module, new), buckets + reductions)


def add_meeting(lowered: LoweredGraph, meet: Callable[[], None], effects: list[str]) -> None:
    """Let the program call `meet` before its first collective, and number it.

    `effects` are the other things in which the ranks' programs must agree.
    """
    graph = lowered.module.graph
    lasting = lasting_storages(graph)
    changing = [node for node in graph.nodes if writes(node) & lasting]
    collectives = [node for node in graph.nodes if is_collective(node)]
    written = set().union(*map(writes, changing))
    lines = [*map(_describe, collectives), *effects]
    lines += [f"changes input {i}" for i, node in enumerate(placeholders(graph)) if storages(node) & written]
    if not lines:
        return
    lowered.number = 1 + zlib.crc32("\n".join(lines).encode())
    nodes = list(graph.nodes)
    first = nodes.index(collectives[0]) if collectives else 0
    lowered.changes_early = not collectives or any(node in nodes[:first] for node in changing)
    if not lowered.changes_early:
        with graph.inserting_before(collectives[0]):
            graph.call_function(meet)
        lowered.module.recompile()


def _describe(node: fx.Node) -> str:
    value: Any = node.meta.get("val")
    return f"{node.target} of {getattr(value, 'dtype', '')}{list(getattr(value, 'shape', ()))} {node.args[1:]}"
