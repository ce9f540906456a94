"""The changes that a program makes to parameters, gradients and optimizer states, in words that ranks can compare.

Ranks may run different programs, for example for batches of other sizes, as long as they make the same changes to what
all of them share. The operations that lead to these changes are followed back to averaged gradients, settings and the
shared tensors themselves. What lies before, a rank's own forward and backward, does not matter.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..trace.markers import GRAD_SYNC
from ..trace.tracing import InputSource, TracedStep
from ..trace.train_state import StateEntry, StepState
from .cleaning import placeholders
from .graphs import is_operation, param_of, storages, writes
from .uniformity import LocalValues, state_storages


@dataclass
class SharedUpdates:
    """The changes to shared tensors, one line for each and one for the operations that compute them.

    by_size: whether a size of an input takes part in them, which may be another one on every rank.
    captured: the captured tensors that take part in them, with a digest of the values that they have during the trace.
    """

    lines: list[str] = field(default_factory=list)
    captured: list[str] = field(default_factory=list)
    writes: bool = False  # whether a tensor changes, not only whether gradients are dropped
    by_size: bool = False


def describe_updates(
    traced: TracedStep, state: StepState, entries: list[StateEntry], local: LocalValues
) -> SharedUpdates:
    """Describe how the program, not yet sharded, changes what all ranks share."""
    graph, effects = traced.graph.graph, traced.effects
    outputs: Any = next(node for node in graph.nodes if node.op == "output").args[0]
    new: dict[str, Any] = {f"the gradient of {state.params[i].name}": out for i, out in effects.grads.items()}
    for entry in effects.states:
        owner = "" if entry.owner is None else f" of {state.params[entry.owner].name}"
        for recipe, name in zip(entry.leaves, entry.names, strict=True):
            new[f"the optimizer's state{name}{owner}"] = recipe.output
    found = SharedUpdates()
    found.lines = sorted(f"{title} is {'dropped' if out is None else 'new'}" for title, out in new.items())
    made = {title: outputs[out] for title, out in new.items() if out is not None}
    names = state_storages(traced, state, entries, graph)
    kept = _Slice(traced.graph, traced.sources, local)
    kept.follow({out for out in made.values() if isinstance(out, fx.Node)}, set(names))
    changed = {names[storage] for node in kept.nodes for storage in writes(node) & names.keys()}
    found.lines += sorted(f"{name} is changed" for name in changed)
    text = kept.text(made)
    if kept.nodes:
        digest = hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]
        found.lines.append(f"computed by {len(kept.nodes)} operations ({digest})")
    found.writes, found.by_size, found.captured = bool(changed or made), kept.by_size, [*kept.captured.values()]
    return found


def _digest(value: Any) -> str:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return type(value).__name__
    content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{value.dtype} of shape {tuple(value.shape)}, {hashlib.sha256(content).hexdigest()[:16]}"


class _Slice:
    """The operations that some values depend on, back to what a rank's own values are combined to."""

    def __init__(self, module: fx.GraphModule, sources: list[InputSource], local: LocalValues) -> None:
        self.module, self.graph, self.local = module, module.graph, local
        self.sources = dict(zip(placeholders(self.graph), sources, strict=True))
        self.captured: dict[str, str] = {}  # by the names of attributes
        self.nodes: set[fx.Node] = set()
        self.by_size = False
        self._numbers: dict[fx.Node, int] = {}

    def follow(self, wanted: set[fx.Node], memory: set[int]) -> None:
        """Add the operations that compute `wanted` or write to `memory`, and all that they depend on."""
        memory = memory.union(*map(storages, wanted))
        before = -1
        while before != len(self.nodes):
            before = len(self.nodes)
            for node in reversed(self.graph.nodes):
                if node.op != "call_function" or node in self.nodes or node in self.local.nodes:
                    continue
                if node in wanted or writes(node) & memory:
                    self.nodes.add(node)
                    if not self._is_boundary(node):
                        wanted.update(node.all_input_nodes)
                        memory.update(*map(storages, node.all_input_nodes))

    def _is_boundary(self, node: fx.Node) -> bool:
        return node.target is GRAD_SYNC or any(arg in self.local.nodes for arg in node.all_input_nodes)

    def text(self, made: dict[str, Any]) -> list[str]:
        """One line for each operation, without anything that depends on a rank or on the rest of the graph."""
        lines = []
        for node in self.graph.nodes:
            if node in self.nodes:
                self._numbers[node] = len(self._numbers)
                target: Any = node.target
                if target is GRAD_SYNC:
                    lines.append(f"average {param_of(node)}")
                    continue
                args = ", ".join(
                    [*map(self._word, node.args), *(f"{k}={self._word(v)}" for k, v in node.kwargs.items())]
                )
                lines.append(f"{target if is_operation(node) else target.__name__}({args})")
                self.by_size |= str(target).startswith("aten.sym_")
        return [*lines, *(f"{title} = {self._word(out)}" for title, out in sorted(made.items()))]

    def _word(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            if value in self._numbers:
                return f"%{self._numbers[value]}"
            if value in self.sources:
                source = self.sources[value]
                return f"{source.kind} {source.i} {source.j}"
            if value.op == "get_attr" and value not in self.local.nodes:
                text = _digest(getattr(self.module, str(value.target)))
                if not value.meta.get("captured"):
                    return text  # a constant of the step
                self.captured[str(value.target)] = text
            shape = [size if isinstance(size, int) else "?" for size in getattr(value.meta.get("val"), "shape", ())]
            return value.op if value in self.local.nodes else f"{value.op} {shape}"
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(self._word, value))}]"
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            self.by_size = True
            return "size"
        if isinstance(value, torch.device):
            return value.type  # its index is the rank's own
        plain = isinstance(value, (bool, int, float, complex, str, torch.dtype, torch.memory_format, torch.layout))
        return repr(value) if plain or value is None else type(value).__name__
