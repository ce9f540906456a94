"""Makes programs: records a step, lowers the recording, and lets the user change the graph."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..engine.wire import Wire
from ..lower.buckets import Bucket, CollectiveOptions
from ..lower.cleaning import clean, lasting_storages, remove_dead_code
from ..lower.direct import write_to_buckets
from ..lower.gathers import lower_gathers
from ..lower.graphs import is_collective, placeholders, storages, writes
from ..lower.schedule import schedule_gradients
from ..parallel_modes import GraphPass, Override
from ..param_layout import Layout
from .captured_state import CallArguments, CapturedState, local_part
from .program import StepProgram
from .step_recording import RecordedStep, record


@dataclass
class GraphPasses:
    """The changes that a user makes to programs."""

    bucket_bytes: int | None = None
    overrides: list[Override] = field(default_factory=list)
    passes: list[GraphPass] = field(default_factory=list)

    def apply(self, module: fx.GraphModule, params: list[torch.Tensor]) -> tuple[fx.GraphModule, bool]:
        before = str(module.graph)
        for override in self.overrides:
            module = override.transform(module, params)
        for each in self.passes:
            module = each(module) or module
        module.graph.lint()
        module.recompile()
        return module, bool(self.overrides) or str(module.graph) != before


def make_program(
    step: Callable[..., Any], call: CallArguments, state: CapturedState, wire: Wire, passes: GraphPasses
) -> StepProgram:
    """Make the program for a call, without communication: ranks may record at different times."""
    recorded = record(step, call, state, passes.overrides)
    clean(recorded.module.graph)
    names = [managed.name for managed in state.roster.params]
    options = CollectiveOptions(wire.group.group_name, wire.world, passes.bucket_bytes)
    module, recorded.buckets = _lower(recorded.module, state.layouts, names, options)
    params = [local_part(rest) for rest in state.rests]
    recorded.module, recorded.changed_by_user = passes.apply(module, params)
    recorded.number = _number_of(recorded.module.graph, _effects_on_shared(recorded, state))
    write_to_buckets(recorded.module)
    return StepProgram(recorded, state, call.leaves)


def _effects_on_shared(recorded: RecordedStep, state: CapturedState) -> list[str]:
    """The changes to gradients and states in which all ranks must agree."""
    effects = recorded.effects
    effects.shares_buffers = bool(state.roster.buffers) and (
        effects.trains or any(m.training for m in state.found.modules)
    )
    lines = [f"gradient {i} {'is lost' if out is None else 'is new'}" for i, out in effects.grads.items()]
    lines += ["shares buffers"] * effects.shares_buffers
    return lines + ["makes states"] * effects.makes_states


def _lower(
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


def _number_of(graph: fx.Graph, effects: list[str]) -> int:
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
