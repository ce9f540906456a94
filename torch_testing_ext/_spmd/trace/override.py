"""`Override`: replaces submodules while a step is traced."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch
from torch import fx, nn

from .train_state import StepState


class Override(ABC):
    """Replaces submodules while a step is traced, and may change the resulting graph."""

    @abstractmethod
    def replacement(self, fqn: str, orig_submodule: nn.Module) -> nn.Module:
        """The module to run instead of `orig_submodule`, or `orig_submodule` itself to keep it.

        A replacement uses the original's parameters (it may hold the original) and has none of its own.
        """

    @abstractmethod
    def transform(self, gm: fx.GraphModule, flat_state: list[torch.Tensor]) -> fx.GraphModule:
        """Return the final graph, changed or not.

        `flat_state` holds this rank's parameters in the order of the graph's inputs.
        """


def overriding(overrides: list[Override]) -> Callable[[StepState], contextlib.AbstractContextManager[None]]:
    """A context manager that installs the replacements. `restoring` puts the original submodules back."""

    @contextlib.contextmanager
    def context(state: StepState) -> Iterator[None]:
        for parent, prefix in list(zip(state.modules, state.module_names, strict=True)):
            for name, child in list(parent._modules.items()):
                replaced = child
                for override in overrides:
                    if replaced is not None:
                        replaced = override.replacement(f"{prefix}.{name}" if prefix else name, replaced)
                parent._modules[name] = replaced
        yield

    return context
