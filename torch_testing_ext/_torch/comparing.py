"""Comparison of tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


@functools.cache
def _tensor_pair() -> Callable[..., Any]:
    from torch.testing._comparison import TensorLikePair

    class AnyTensors(TensorLikePair):
        """Two tensors of any subclasses; the floors can raise the tolerances but not lower them."""

        def __init__(self, actual: Any, expected: Any, *, rtol_floor: float, atol_floor: float, **options: Any) -> None:
            super().__init__(actual, expected, **options)
            self.rtol = max(self.rtol, rtol_floor)
            self.atol = max(self.atol, atol_floor)

        def _process_inputs(self, actual: Any, expected: Any, *, id: Any, allow_subclasses: bool) -> Any:
            for tensor in (actual, expected):
                self._check_supported(tensor, id=id)
            return actual, expected

    return AnyTensors


def compare_tensors(actual: torch.Tensor, expected: torch.Tensor, **options: Any) -> None:
    """Call the equivalent of `torch.testing.assert_close` on two tensors of any subclasses; raise the same errors.

    The public function imports all of torch.distributed.tensor at its first call, which takes half a second in every
    rank, and refuses subclasses that do not inherit from one another. `torch.testing._comparison`: 2.11 to 2.15.
    """
    from torch.testing._comparison import ErrorMeta

    try:
        _tensor_pair()(actual, expected, **options).compare()
    except ErrorMeta as meta:
        error = meta.to_error()
    else:
        return
    raise error


def script_container_types() -> tuple[type, type]:
    """Return TorchScript's list and dict. `torch._C.ScriptList`, `ScriptDict`: 2.11 to 2.15."""
    return torch._C.ScriptList, torch._C.ScriptDict
