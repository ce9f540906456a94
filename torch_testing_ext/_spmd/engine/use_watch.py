"""Finds parameters that the engine does not manage: those that a backward reaches, and those that a step uses."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torch_testing_ext._torch.spmd import function_mode_class

from .managed_params import managed_by

if TYPE_CHECKING:
    from torch.overrides import TorchFunctionMode as Mode
else:
    Mode = function_mode_class()


def unmanaged_parameters(roots: Iterable[Any], known: Collection[int]) -> list[nn.Parameter]:
    """Parameters among the leaves of a graph that the engine does not manage. Other leaves are the rank's own.

    `known` are the identities of parameters that it does manage.
    """
    found = []
    seen = set()
    waiting = [getattr(root, "grad_fn", None) or getattr(root, "node", None) for root in roots]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ != "AccumulateGrad":
            waiting += [following for following, _ in node.next_functions]
            continue
        leaf = node.variable
        if id(leaf) not in known and isinstance(leaf, nn.Parameter) and managed_by(leaf) is None:
            found.append(leaf)
    return found


class UseWatch(Mode):
    """Collects parameters that operations use, for a step in which no trainable one was found."""

    def __init__(self) -> None:
        super().__init__()
        self._hooks: dict[int, Any] = {}
        self.reached: list[torch.Tensor] = []  # by a backward

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in (*args, *(kwargs or {}).values()):
            for each in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(each, nn.Parameter) and each.requires_grad and id(each) not in self._hooks:
                    self._watch(each)
        return func(*args, **(kwargs or {}))

    def _watch(self, param: nn.Parameter) -> None:
        if managed_by(param) is None:
            hook = param.register_post_accumulate_grad_hook(self.reached.append)  # type: ignore[no-untyped-call]
            self._hooks[id(param)] = hook

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks.values():
            hook.remove()
