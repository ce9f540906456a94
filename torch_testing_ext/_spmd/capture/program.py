"""Programs: a lowered graph as a function, with the places that its inputs come from and its outputs go to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torch_testing_ext._torch.spmd import (
    below_autograd,
    disable_torch_function,
    dtensor_like,
    local_tensor,
    set_grad_enabled,
    tree,
)

from ..lower.emit import emit
from ..lower.lowering import LoweredGraph
from .captured_state import CapturedState, local_part
from .recording import InputSource, NewState, RecordedStep, Recipe


class Program:
    """One program, ready to be called with the leaves of a step's arguments."""

    def __init__(self, recorded: RecordedStep, lowered: LoweredGraph, state: CapturedState, changed: bool) -> None:
        self.lowered, self.effects, self.changed_by_user = lowered, recorded.effects, changed
        self.present = state.present_grads()
        self.sources = recorded.sources
        self.run = emit(lowered.module)
        self.verified = 0  # how often
        self.calls = 0
        self.rates: dict[int, tuple[float, torch.Tensor]] = {}
        self.bind(state)

    @property
    def meets(self) -> bool:
        """Whether the ranks must run it together: it communicates or changes what they share, or the engine would."""
        return self.lowered.number != 0 or any(self.state.roster.plans.values())

    def bind(self, state: CapturedState) -> None:
        """Look up everything that stays the same from call to call."""
        self.state = state
        self._template: list[Any] = [None] * len(self.sources)
        self._varying: list[tuple[int, InputSource]] = []
        for position, source in enumerate(self.sources):
            if source.kind in ("arg", "grad", "lr", "lr tensor"):
                self._varying.append((position, source))
            else:
                self._template[position] = local_part(self._object(source, []))

    def fits(self) -> bool:
        """Whether it is valid for model and optimizers as they are now."""
        return self.state.is_current() and self.state.present_grads() == self.present

    def __call__(self, leaves: list[Any]) -> Any:
        """Run with autograd and autocast off: the graph has both in it."""
        inputs = self._template.copy()
        with disable_torch_function():
            for position, source in self._varying:
                inputs[position] = self._value(source, leaves)
        grad_mode = torch.is_grad_enabled()
        set_grad_enabled(False)
        guard = below_autograd()
        try:
            outputs = self._run(inputs)
        finally:
            del guard
            set_grad_enabled(grad_mode)
        with disable_torch_function():
            for i, index in self.effects.grads.items():
                self._install_grad(self.state.rests[i], None if index is None else outputs[index])
        if self.effects.states or self.effects.buffers:
            self._install(outputs)
        self.calls += 1
        values = [self._made(recipe, outputs, leaves) for recipe in self.effects.result]
        return tree().tree_unflatten(values, self.effects.result_spec)

    def _run(self, inputs: list[Any]) -> Any:
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled(self.state.local(0).device.type):
            with torch.autocast("cpu", enabled=False), torch.autocast(self.state.local(0).device.type, enabled=False):
                return self.run(inputs)
        return self.run(inputs)

    def _value(self, source: InputSource, leaves: list[Any]) -> Any:
        if source.kind == "arg":
            return leaves[source.i]
        if source.kind == "grad":
            return local_part(self.state.rests[source.i].grad)
        rate = self.state.groups[source.i]["lr"]
        if source.kind == "lr" or isinstance(rate, torch.Tensor):
            return rate
        if source.i not in self.rates or self.rates[source.i][0] != rate:
            self.rates[source.i] = rate, torch.tensor(rate, dtype=torch.float64)
        return self.rates[source.i][1]

    def _install_grad(self, rest: Any, value: torch.Tensor | None) -> None:
        if value is None:
            rest.grad = None
        else:
            rest.grad = dtensor_like(rest, value) if isinstance(rest, DTensor) else value

    def _install(self, outputs: Sequence[Any]) -> None:
        state = self.state
        for new in self.effects.states:
            leaves = [self._state_leaf(new, self._made(recipe, outputs, [])) for recipe in new.leaves]
            key = new.key if new.owner is None else state.rests[new.owner]
            state.optimizers[new.optimizer].state[key] = tree().tree_unflatten(leaves, new.spec)
        for i, index in self.effects.buffers.items():
            old, value = state.buffers[i], outputs[index]
            if old.shape == value.shape and old.dtype == value.dtype:
                old.copy_(value)
                continue
            for module, name, found in state.slots("_buffers"):
                if found is old:
                    module._buffers[name] = value

    def _state_leaf(self, new: NewState, value: Any) -> Any:
        """Keep the rank's rows of a new state as a DTensor."""
        if new.owner is None or not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or not value.dim():
            return value
        rest = self.state.rests[new.owner]
        rows = self.state.params[new.owner].sharded and value.shape == local_tensor(rest).shape
        return dtensor_like(rest, value) if rows else value

    def _made(self, recipe: Recipe, outputs: Sequence[Any], leaves: list[Any]) -> Any:
        if recipe.output is not None:
            return outputs[recipe.output]
        return recipe.constant if recipe.source is None else self._object(recipe.source, leaves)

    def _object(self, source: InputSource, leaves: list[Any]) -> Any:
        """The object that a graph input is read from."""
        state = self.state
        if source.kind == "arg":
            return leaves[source.i]
        if source.kind == "param":
            return state.rests[source.i]
        if source.kind == "grad":
            return state.rests[source.i].grad
        if source.kind == "buffer":
            return state.buffers[source.i]
        if source.kind == "state":
            return state.entries[source.i].leaves[source.j]
        return state.groups[source.i]["lr"]
