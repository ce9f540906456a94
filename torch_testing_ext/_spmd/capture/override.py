"""`Override`: replaces submodules while a step is recorded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import fx, nn


class Override(ABC):
    """Replaces submodules while a step is recorded, and may change the resulting graph."""

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


def replace_submodules(overrides: Iterable[Override], roots: list[nn.Module]) -> None:
    """Install the replacements. Whoever calls this restores the modules."""
    for number, root in enumerate(roots):
        for prefix, parent in list(root.named_modules(prefix="" if len(roots) == 1 else str(number))):
            for name, child in list(parent._modules.items()):
                replaced = child
                for override in overrides:
                    if replaced is not None:
                        replaced = override.replacement(f"{prefix}.{name}" if prefix else name, replaced)
                parent._modules[name] = replaced
