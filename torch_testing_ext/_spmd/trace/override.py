"""Replacing submodules and rewriting the graph for them, while a step is traced."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch
from torch import fx, nn

from .state import StepState


class Override(ABC):
    """Says how some submodules are traced: by what other module, and what to do to the graph afterwards."""

    @abstractmethod
    def replacement(self, fqn: str, orig_submodule: nn.Module) -> nn.Module:
        """The module to run in the place of `orig_submodule`; itself where nothing is to change.

        A replacement works with the original's parameters (it may hold the original); it brings none of its own.
        """

    @abstractmethod
    def transform(self, gm: fx.GraphModule, flat_state: list[torch.Tensor]) -> fx.GraphModule:
        """The final graph, changed or not. `flat_state`: this rank's parameters, in the order of the graph's inputs."""


def overriding(overrides: list[Override]) -> Callable[[StepState], contextlib.AbstractContextManager[None]]:
    @contextlib.contextmanager
    def context(state: StepState) -> Iterator[None]:
        # The registry of submodules goes back to what it was together with all else that a trace changes.
        for parent, prefix in list(zip(state.modules, state.module_names, strict=True)):
            for name, child in list(parent._modules.items()):
                replaced = child
                for override in overrides:
                    if replaced is not None:
                        replaced = override.replacement(f"{prefix}.{name}" if prefix else name, replaced)
                parent._modules[name] = replaced
        yield

    return context
