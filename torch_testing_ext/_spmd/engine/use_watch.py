"""Sees which parameters a step uses, for a step in whose arguments, closure and globals no trainable one was found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torch_testing_ext._torch.spmd import function_mode_class

from .managed_params import managed_by

if TYPE_CHECKING:
    from torch.overrides import TorchFunctionMode as Mode
else:
    Mode = function_mode_class()


class UseWatch(Mode):
    """Collects parameters that operations use and that the engine does not manage."""

    def __init__(self) -> None:
        super().__init__()
        self._hooks: dict[int, Any] = {}
        self.reached: list[torch.Tensor] = []  # by a backward

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in (*args, *(kwargs or {}).values()):
            for each in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(each, torch.nn.Parameter) and each.requires_grad and id(each) not in self._hooks:
                    self._watch(each)
        return func(*args, **(kwargs or {}))

    def _watch(self, param: torch.nn.Parameter) -> None:
        if managed_by(param) is None:
            hook = param.register_post_accumulate_grad_hook(self.reached.append)  # type: ignore[no-untyped-call]
            self._hooks[id(param)] = hook

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks.values():
            hook.remove()
