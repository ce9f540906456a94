"""Lowering of the traced local program to the data-parallel one: clean it, follow shards, lower markers in buckets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..param_layout import Layout
from ..trace.distribute import is_step_count, layout_owner
from ..trace.tracing import InputSource, TracedStep
from ..trace.train_state import StateEntry, StepState
from .buckets import Bucket, CollectiveOptions
from .buffers import share_written_buffers
from .cleaning import clean, placeholders, remove_dead_code
from .gathers import lower_gathers
from .handshake import Handshake
from .schedule import schedule_gradients
from .sharding import ShardedGraph
from .uniformity import LocalValues, refuse_divergence
from .updates import SharedUpdates, describe_updates


@dataclass
class LoweredProgram:
    """A graph with collectives, and the description of its inputs and outputs."""

    graph: fx.GraphModule
    traced: TracedStep
    buckets: list[Bucket]
    constant_lrs: set[tuple[int, int]]
    handshake: Handshake | None = None  # None without collectives
    shards: dict[int, Layout] = field(default_factory=dict)  # graph output -> its layout, if it is a shard
    updates: SharedUpdates = field(default_factory=SharedUpdates)
    changed_by_user: bool = False  # by an override or a custom pass

    @property
    def used(self) -> list[bool]:
        """For each source, whether the graph reads it."""
        return [bool(node.users) for node in placeholders(self.graph.graph)]


def lower(
    traced: TracedStep, state: StepState, entries: list[StateEntry], options: CollectiveOptions
) -> LoweredProgram:
    """Lower `traced`, whose graph is consumed, to the program that every rank runs."""
    lr_groups, lr_values = _learning_rates(state)
    constant_lrs = clean(traced, lr_groups, lr_values)
    graph = traced.graph.graph
    sharded = any(layout.sharded for layout in traced.layouts)
    local = LocalValues(graph, traced.sources, options)
    refuse_divergence(traced, state, entries, local)
    updates = describe_updates(traced, state, entries, local)
    names = [ref.name for ref in state.params]
    shards: dict[int, Layout] = {}
    buckets: list[Bucket] = []
    if sharded:
        sharder = _sharder(traced, state, entries, names, options.group, local)
        graph = sharder.run()
        shards = sharder.output_layouts
        remove_dead_code(graph)
        if options.world == 1:
            _drop_trivial_collectives(graph)
        buckets = lower_gathers(graph, sharder.layouts, sharder.names, options)
    buckets = share_written_buffers(graph, traced.sources, traced.effects.buffers, state, options) + buckets
    new, grad_buckets = schedule_gradients(graph, traced.layouts, names, options)
    remove_dead_code(new)
    new.lint()
    module = fx.GraphModule(traced.graph, new)
    return LoweredProgram(module, traced, buckets + grad_buckets, constant_lrs, shards=shards, updates=updates)


def _learning_rates(state: StepState) -> tuple[dict[int, list[tuple[int, int]]], dict[tuple[int, int], Any]]:
    groups: dict[int, list[tuple[int, int]]] = {}
    values: dict[tuple[int, int], Any] = {}
    for i, optimizer in enumerate(state.optimizers):
        for j, group in enumerate(optimizer.param_groups):
            values[(i, j)] = group.get("lr")
            for param in group["params"]:
                groups.setdefault(state.known_index(param), []).append((i, j))
    return groups, values


def _sharder(
    traced: TracedStep,
    state: StepState,
    entries: list[StateEntry],
    names: list[str],
    group: str,
    local: LocalValues,
) -> ShardedGraph:
    layouts, effects = traced.layouts, traced.effects
    outputs: Any = next(node for node in traced.graph.graph.nodes if node.op == "output").args[0]
    must = {output: i for i, output in effects.grads.items() if output is not None and layouts[i].sharded}
    for new in effects.states:
        for recipe, name in zip(new.leaves, new.names, strict=True):
            if new.owner is None or recipe.output is None or not layouts[new.owner].sharded or is_step_count(name):
                continue
            value = outputs[recipe.output].meta["val"] if isinstance(outputs[recipe.output], fx.Node) else None
            if isinstance(value, torch.Tensor) and value.shape == layouts[new.owner].shape:
                must[recipe.output] = new.owner
    return ShardedGraph(
        traced.graph.graph,
        traced.sources,
        layouts,
        names,
        _state_layouts(state, entries),
        [ref.value.requires_grad for ref in state.params],
        group,
        local,
        must,
        {recipe.output for recipe in effects.result if recipe.output is not None},
    )


def _state_layouts(state: StepState, entries: list[StateEntry]) -> dict[InputSource, int]:
    layouts = {}
    for e, entry in enumerate(entries):
        for j in range(len(entry.leaves)):
            if (owner := layout_owner(entry, j, state)) is not None:
                layouts[InputSource("state", e, j)] = owner
    return layouts


def _drop_trivial_collectives(graph: fx.Graph) -> None:
    c10d = torch.ops._c10d_functional
    for node in list(graph.nodes):
        if node.target in (c10d.all_reduce.default, c10d.wait_tensor.default):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
