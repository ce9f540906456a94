"""The values of a graph that may differ between ranks, and the refusal of those that would reach the model's state.

Parameters, optimizer states and reduced gradients are the same on all ranks. Inputs and random numbers are a rank's
own, and so is everything computed from them, until a collective over all ranks reduces it. A rank's own value in a
parameter, a gradient or an optimizer state would make the ranks' models diverge.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..spmd_errors import SPMDError
from ..trace.markers import GRAD_SYNC
from ..trace.tracing import InputSource, TracedStep
from ..trace.train_state import StateEntry, StepState
from .buckets import CollectiveOptions
from .cleaning import placeholders
from .graphs import is_operation, storages, writes

_UNIFYING = {"all_reduce", "all_reduce_", "all_gather_into_tensor", "broadcast", "broadcast_"}


class LocalValues:
    """The nodes of a graph, in its current order, whose values may differ between ranks."""

    def __init__(self, graph: fx.Graph, sources: list[InputSource], options: CollectiveOptions) -> None:
        self.graph, self.sources, self.group = graph, sources, options.group
        self.nodes: set[fx.Node] = set()
        self.writers: dict[fx.Node, set[int]] = {}  # node -> the storages that it makes local
        captured = set().union(*(storages(node) for node in graph.nodes if node.op == "get_attr"))
        self.storages: set[int] = set()
        if options.world == 1:
            return
        self._run()
        if self.storages & captured:  # a captured tensor keeps the local value that the call before wrote to it
            self.storages &= captured
            self._run()

    def _run(self) -> None:
        source_of = dict(zip(placeholders(self.graph), self.sources, strict=True))
        for node in self.graph.nodes:
            local = self._is_local(node, source_of)
            if local:
                self.nodes.add(node)
            if local and node.op == "call_function":
                made = writes(node) - {-1}
                if made:
                    self.writers[node] = made
                    self.storages |= made

    def _is_local(self, node: fx.Node, source_of: dict[fx.Node, InputSource]) -> bool:
        value = node.meta.get("val")
        if node.op == "placeholder":
            # A 0-d tensor is a setting, such as a learning rate, and has the same value on all ranks.
            return source_of[node].kind == "arg" and isinstance(value, torch.Tensor) and value.dim() > 0
        if node.op == "get_attr":
            return bool(storages(node) & self.storages)
        if node.target is GRAD_SYNC or node.op == "output":
            return False
        if is_operation(node):
            target: Any = node.target
            if torch.Tag.nondeterministic_seeded in target.tags:
                return True
            name = target._schema.name.split("::")[-1]
            if name in _UNIFYING and self.group in node.args:
                return False
            if name.startswith("sym_"):
                return False  # sizes: the same on all ranks, or the ranks' updates differ in eager mode, too
        return any(arg in self.nodes or storages(arg) & self.storages for arg in node.all_input_nodes)

    def is_local(self, node: fx.Node) -> bool:
        """Whether the value of `node` may differ between ranks at any time."""
        return node in self.nodes or bool(storages(node) & self.storages)


def refuse_divergence(traced: TracedStep, state: StepState, entries: list[StateEntry], local: LocalValues) -> None:
    """Refuse a step that writes a rank's own values to parameters, their gradients or optimizer states."""
    names = state_storages(traced, state, entries, local.graph)
    for node, made in local.writers.items():
        for storage in made & names.keys():
            raise _divergence(names[storage], node.meta.get("where"))
    outputs: Any = next(node for node in local.graph.nodes if node.op == "output").args[0]
    effects = traced.effects
    found = [(output, f"the gradient of {state.params[i].name}") for i, output in effects.grads.items()]
    for new in effects.states:
        owner = "" if new.owner is None else f" of {state.params[new.owner].name}"
        found += [(r.output, f"the optimizer's state{n}{owner}") for r, n in zip(new.leaves, new.names, strict=True)]
    for output, name in found:
        if output is not None and isinstance(outputs[output], fx.Node) and local.is_local(outputs[output]):
            raise _divergence(name, outputs[output].meta.get("where"))


def state_storages(traced: TracedStep, state: StepState, entries: list[StateEntry], graph: fx.Graph) -> dict[int, str]:
    """The storages of parameters, gradients and optimizer states that are inputs of the graph, and their names."""
    names = {}
    for node, source in zip(placeholders(graph), traced.sources, strict=True):
        if source.kind == "param":
            name = f"the parameter {state.params[source.i].name}"
        elif source.kind == "grad":
            name = f"the gradient of {state.params[source.i].name}"
        elif source.kind == "state":
            name = f"the optimizer's state{entries[source.i].names[source.j]}"
        else:
            continue
        names.update(dict.fromkeys(storages(node), name))
    return names


def _divergence(name: str, where: str | None) -> SPMDError:
    return SPMDError(
        f"The step writes values that differ between ranks (from the batch, or random) to {name}. The ranks' models "
        "would diverge.",
        remedy="Average them over ranks first: all_reduce(value, 'avg', group), from torch.distributed import "
        "_functional_collectives. backward() averages gradients, but not those of torch.autograd.grad or computed by "
        "hand.",
        where=where,
    )
