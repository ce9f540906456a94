"""Programs: a lowered graph as a function, with the places that its inputs come from and its outputs go to."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from torch_testing_ext._process.words import first_names, size_in_words
from torch_testing_ext._torch import spmd

from ..lower.buckets import Bucket
from ..lower.graphs import is_collective
from .captured_state import CapturedState
from .step_recording import Recipe, RecordedStep

_OPERATION = re.compile(r"torch\.ops\.(\w+)\.(\w+)\.(\w+)\(")


class StepProgram:
    """One program, ready to be called with the leaves of a step's arguments."""

    def __init__(self, recorded: RecordedStep, state: CapturedState, leaves: list[Any]) -> None:
        self.recorded, self.effects, self.present = recorded, recorded.effects, state.present_grads()
        self.objects = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]  # alive, as keys have their ids
        self.run = emit(recorded.module)
        self.verified, self.calls, self.key = 0, 0, state.key()
        self.bind(state)

    @property
    def meets(self) -> bool:
        """Must the ranks run it together? It communicates or changes what they share, or the engine would."""
        return self.recorded.number != 0 or any(self.state.roster.plans.values())

    def bind(self, state: CapturedState) -> None:
        """Look up everything that stays the same from call to call."""
        self.state = state
        varying = ("arg", "grad", "lr")
        self._template = [None if s.kind in varying else state.value(s, []) for s in self.recorded.sources]
        self._varying = [(position, s) for position, s in enumerate(self.recorded.sources) if s.kind in varying]

    def fits(self) -> bool:
        return self.state.guards.is_current() and self.state.present_grads() == self.present

    def __call__(self, leaves: list[Any]) -> Any:
        """Run with autograd and autocast off: the graph has both in it."""
        inputs: list[Any] = self._template.copy()
        grad_mode, guard, cast = torch.is_grad_enabled(), spmd.below_autograd(), self._autocast()
        spmd.set_grad_enabled(False)
        try:
            with spmd.disable_torch_function():
                for position, source in self._varying:
                    inputs[position] = self.state.value(source, leaves)
            outputs = self.run(inputs)
        finally:
            del guard
            spmd.set_grad_enabled(grad_mode)
            for device in cast:
                torch.set_autocast_enabled(device, True)
        with spmd.disable_torch_function():
            for i, index in self.effects.grads.items():
                rest, value = self.state.rests[i], None if index is None else outputs[index]
                rest.grad = spmd.dtensor_like(rest, value) if isinstance(rest, DTensor) and value is not None else value
        self.calls += 1
        values = [self._made(recipe, outputs, leaves) for recipe in self.effects.result]
        return spmd.tree().tree_unflatten(values, self.effects.result_spec)

    def _autocast(self) -> list[str]:
        """Turn autocast off. Returns the devices for which it was on."""
        found = [d for d in {"cpu", self.state.rests[0].device.type} if torch.is_autocast_enabled(d)]
        for device in found:
            torch.set_autocast_enabled(device, False)
        return found

    def _made(self, recipe: Recipe, outputs: Sequence[Any], leaves: list[Any]) -> Any:
        if recipe.output is not None:
            return outputs[recipe.output]
        return recipe.constant if recipe.source is None else self.state.object(recipe.source, leaves)


def emit(module: fx.GraphModule) -> Callable[..., Any]:
    """A function that takes the values of all placeholders, in order, and returns the graph's outputs."""
    code = module.graph.python_code("self")
    names = dict(code.globals)

    def bind(found: re.Match[str]) -> str:
        name = "_".join(found.groups())
        names[name] = spmd.fastest_operation(*found.groups())
        return f"{name}("

    source = _OPERATION.sub(bind, code.src)
    exec(compile(source, f"<spmd step {id(module):x}>", "exec"), names)
    forward = names["forward"]
    return lambda inputs: forward(module, *inputs)


@dataclass(frozen=True)
class StepReport:
    """A summary of the program of the last call. `print(step.report())` shows it."""

    name: str
    world: int
    recordings: int
    operations: int
    collectives: dict[str, int]
    buckets: list[Bucket]
    verified: int  # how often

    def __str__(self) -> str:
        count = ", ".join(f"{n} {name}" for name, n in self.collectives.items()) or "no collectives"
        verified = f"verified {self.verified} times" if self.verified else "not verified"
        lines = [
            f"{self.name}: {self.operations} operations, {count}; captured on {self.world} ranks, "
            f"recorded {self.recordings} times, {verified}"
        ]
        for number, bucket in enumerate(self.buckets):
            dtype = str(bucket.dtype).removeprefix("torch.")
            size, names = size_in_words(bucket.nbytes), first_names(bucket.names, 4)
            lines.append(f"  {number}: {bucket.collective:<14} {size:>10} {dtype}: {names}")
        return "\n".join(lines)


def report_of(name: str, program: StepProgram, recordings: int) -> StepReport:
    nodes = program.recorded.module.graph.nodes
    operations = sum(node.op not in ("placeholder", "output") for node in nodes)
    kinds = Counter(str(node.target).split(".")[1].rstrip("_") for node in nodes if is_collective(node))
    world, buckets = program.state.layouts[0].world, program.recorded.buckets
    return StepReport(name, world, recordings, operations, dict(kinds), buckets, program.verified)
