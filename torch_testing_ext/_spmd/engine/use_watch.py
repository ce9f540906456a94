"""Sees which parameters a step uses, for a step in whose arguments, closure and globals no trainable one was found."""

from __future__ import annotations

from collections.abc import Iterator
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
        self._used: dict[int, torch.nn.Parameter] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in (*args, *(kwargs or {}).values()):
            for each in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(each, torch.nn.Parameter) and id(each) not in self._used and managed_by(each) is None:
                    self._used[id(each)] = each
        return func(*args, **(kwargs or {}))

    def with_gradients(self) -> Iterator[torch.Tensor]:
        """The parameters of which a backward has computed gradients."""
        return (param for param in self._used.values() if param.grad is not None)
