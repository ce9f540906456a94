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
    set_grad_enabled,
    tree,
)

from ..lower.emit import emit
from ..lower.lowering import LoweredGraph
from .captured_state import CapturedState
from .recording import RecordedStep, Recipe


class Program:
    """One program, ready to be called with the leaves of a step's arguments."""

    def __init__(
        self, recorded: RecordedStep, lowered: LoweredGraph, state: CapturedState, leaves: list[Any], changed: bool
    ) -> None:
        self.lowered, self.effects, self.changed_by_user = lowered, recorded.effects, changed
        self.objects = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]  # alive, as keys have their ids
        self.sources, self.present = recorded.sources, state.present_grads()
        self.run = emit(lowered.module)
        self.verified, self.calls = 0, 0
        self.bind(state)

    @property
    def meets(self) -> bool:
        """Whether the ranks must run it together: it communicates or changes what they share, or the engine would."""
        return self.lowered.number != 0 or any(self.state.roster.plans.values())

    def bind(self, state: CapturedState) -> None:
        """Look up everything that stays the same from call to call."""
        self.state = state
        varying = ("arg", "grad", "lr")
        self._template = [None if s.kind in varying else state.value(s, []) for s in self.sources]
        self._varying = [(position, s) for position, s in enumerate(self.sources) if s.kind in varying]

    def fits(self) -> bool:
        """Whether it is valid for model and optimizers as they are now."""
        return self.state.is_current() and self.state.present_grads() == self.present

    def __call__(self, leaves: list[Any]) -> Any:
        """Run with autograd and autocast off: the graph has both in it."""
        inputs: list[Any] = self._template.copy()
        grad_mode, guard, cast = torch.is_grad_enabled(), below_autograd(), self._autocast()
        set_grad_enabled(False)
        try:
            with disable_torch_function():
                for position, source in self._varying:
                    inputs[position] = self.state.value(source, leaves)
            outputs = self.run(inputs)
        finally:
            del guard
            set_grad_enabled(grad_mode)
            for device in cast:
                torch.set_autocast_enabled(device, True)
        with disable_torch_function():
            for i, index in self.effects.grads.items():
                rest, value = self.state.rests[i], None if index is None else outputs[index]
                rest.grad = dtensor_like(rest, value) if isinstance(rest, DTensor) and value is not None else value
        self.calls += 1
        values = [self._made(recipe, outputs, leaves) for recipe in self.effects.result]
        return tree().tree_unflatten(values, self.effects.result_spec)

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

