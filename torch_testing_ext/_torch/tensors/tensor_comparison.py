"""Comparison of tensors, as `torch.testing.assert_close` does it."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from torch_testing_ext._torch import replacing

_LARGE = 4096  # numbers
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@functools.cache
def _pairs() -> tuple[type, type]:
    """The classes of two tensors and of two numbers."""
    from torch.testing._comparison import NumberPair, TensorLikePair

    class AnyTensors(TensorLikePair):
        """Two tensors of any subclasses."""

        def _process_inputs(self, actual: Any, expected: Any, *, id: Any, allow_subclasses: bool) -> Any:
            for tensor in (actual, expected):
                self._check_supported(tensor, id=id)
            return actual, expected

        def _compare_regular_values_close(
            self, actual: Any, expected: Any, *, rtol: float, atol: float, **options: Any
        ) -> None:
            if rtol >= 0 and atol >= 0 and _are_large_and_equal(actual, expected):  # others are errors
                return
            super()._compare_regular_values_close(actual, expected, rtol=rtol, atol=atol, **options)

    class AnyNumbers(NumberPair):
        """Two numbers of Python, with the default tolerances of 32 bits."""

        _TYPE_TO_DTYPE = {int: torch.int64, float: torch.float32, complex: torch.complex64}  # noqa: RUF012

    return AnyTensors, AnyNumbers


def _are_large_and_equal(actual: Any, expected: Any) -> bool:
    """Whether all numbers of two plain tensors are equal. This needs no memory, whereas tolerances make several copies.

    A NaN equals nothing here. Not asked of small tensors, nor within a mode that sees every operation.
    """
    if not type(actual) is type(expected) is torch.Tensor or actual.numel() < _LARGE:
        return False
    if actual.dtype != expected.dtype or actual.dtype not in _FLOATS:
        return False
    if not actual.device.type == expected.device.type == "cpu" or torch._C._len_torch_dispatch_stack():
        return False
    return torch.equal(actual, expected)


def compare(actual: Any, expected: Any, *, rtol_floor: float, atol_floor: float, **options: Any) -> None:
    """Call the equivalent of `torch.testing.assert_close` on two tensors of any subclasses, or two numbers of Python.

    It raises the same errors. The floors can raise the tolerances but not lower them.

    The public function imports all of torch.distributed.tensor at its first call, which takes half a second in every
    rank, and refuses subclasses that do not inherit from one another. `torch.testing._comparison`: 2.11 to 2.15.
    """
    from torch.testing._comparison import ErrorMeta

    tensors, numbers = _pairs()
    try:
        pair: Any = (tensors if isinstance(actual, torch.Tensor) else numbers)(actual, expected, **options)
        pair.rtol, pair.atol = max(pair.rtol, rtol_floor), max(pair.atol, atol_floor)
        pair.compare()
    except ErrorMeta as meta:
        error = meta.to_error()
    else:
        return
    raise error


def wrap_differences(around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap what looks for differences in `torch.testing.assert_close`, by whatever name a test has imported that.

    `torch.testing._comparison.not_close_error_metas`: 2.11 to 2.15.
    """
    replacing.replace_for_good("differences of tensors", lambda _, find: around(find))


def script_container_types() -> tuple[type, type]:
    """Return TorchScript's list and dict. `torch._C.ScriptList`, `ScriptDict`: 2.11 to 2.15."""
    return torch._C.ScriptList, torch._C.ScriptDict
