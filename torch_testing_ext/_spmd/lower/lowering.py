"""Lowering of a recorded step to the program that every rank runs: its markers become bucketed collectives."""

from __future__ import annotations

import zlib
from typing import Any

from torch import fx

from ..param_layout import Layout
from .buckets import Bucket, CollectiveOptions
from .cleaning import lasting_storages, remove_dead_code
from .gathers import lower_gathers
from .graphs import is_collective, placeholders, storages, writes
from .schedule import schedule_gradients


def lower(
    module: fx.GraphModule, layouts: list[Layout], names: list[str], options: CollectiveOptions
) -> tuple[fx.GraphModule, list[Bucket]]:
    """Lower a clean graph, which is consumed. Returns one with collectives, and their buckets."""
    buckets: list[Bucket] = []
    if any(layout.sharded for layout in layouts):
        buckets = lower_gathers(module.graph, layouts, names, options)
    new, reductions = schedule_gradients(module.graph, layouts, names, options)
    remove_dead_code(new)
    new.lint()
    return fx.GraphModule(module, new), buckets + reductions


def number_of(graph: fx.Graph, effects: list[str]) -> int:
    """The number that ranks compare before they run a program: of its collectives, and of what it changes.

    `effects` are other changes. The number is 0 if the program neither communicates nor changes what ranks share.
    """
    written = lasting_storages(graph).intersection(set().union(*map(writes, graph.nodes)))
    lines = [*map(_describe, filter(is_collective, graph.nodes)), *effects]
    lines += [f"changes input {i}" for i, node in enumerate(placeholders(graph)) if storages(node) & written]
    return 1 + zlib.crc32("\n".join(lines).encode()) if lines else 0


def _describe(node: fx.Node) -> str:
    value: Any = node.meta.get("val")
    return f"{node.target} of {getattr(value, 'dtype', '')}{list(getattr(value, 'shape', ()))} {node.args[1:]}"
