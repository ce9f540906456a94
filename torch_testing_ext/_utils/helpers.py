"""Small helpers that distributed tests import along with the rest."""

from __future__ import annotations

import functools
import inspect
import io
import math
import os
import sys
import types
import unittest
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from torch_testing_ext._machine.flags import flag

# -- tensors


def noncontiguous_like(t: torch.Tensor) -> torch.Tensor:
    """A copy with gaps between its elements, filled with what shows when read; unchanged if it has gaps already."""
    if not t.is_contiguous():
        return t
    filler = math.nan if t.dtype.is_floating_point or t.dtype.is_complex else (True if t.dtype == torch.bool else 12)
    spread = t.new_full((*t.shape, 2), filler)
    spread[..., 1] = t.detach()
    return spread[..., 1].requires_grad_(t.requires_grad)


def clone_input_helper(input: Any) -> Any:
    """Clones of the tensors in a value that may hold some; sequences become tuples."""
    if isinstance(input, torch.Tensor):
        return torch.clone(input)
    if isinstance(input, Sequence) and not isinstance(input, str):
        return tuple(clone_input_helper(item) for item in input)
    return input


def to_gpu(obj: Any, type_map: dict[torch.dtype, torch.dtype] | None = None) -> Any:
    """The same on the current CUDA device, with tensors as fresh leaves, of other dtypes where the map says so."""
    if isinstance(obj, torch.Tensor):
        if not obj.is_leaf:
            raise ValueError("to_gpu copies leaf tensors only")
        dtype = (type_map or {}).get(obj.dtype, obj.dtype)
        return obj.detach().to(dtype=dtype, device="cuda", copy=True).requires_grad_(obj.requires_grad)
    if isinstance(obj, (list, tuple)):
        return type(obj)(to_gpu(item, type_map) for item in obj)
    return obj


def _gradcheck_defaults(options: dict[str, Any]) -> dict[str, Any]:
    """Batched gradients too, and by the fast way unless PYTORCH_TEST_WITH_SLOW_GRADCHECK=1 asks for the slow one."""
    defaults = {"check_batched_grad": True, "fast_mode": not flag("TEST_WITH_SLOW_GRADCHECK")}
    return {**defaults, **{name: value for name, value in options.items() if value is not None}}


def gradcheck(fn: Any, inputs: Any, **kwargs: Any) -> bool:
    """`torch.autograd.gradcheck`, checking more by default."""
    return torch.autograd.gradcheck(fn, inputs, **_gradcheck_defaults(kwargs))


def gradgradcheck(fn: Any, inputs: Any, grad_outputs: Any = None, **kwargs: Any) -> bool:
    """`torch.autograd.gradgradcheck`, checking more by default."""
    return torch.autograd.gradgradcheck(fn, inputs, grad_outputs, **_gradcheck_defaults(kwargs))


class BytesIOContext(io.BytesIO):
    """A buffer that is still open after a `with`."""

    def __exit__(self, *_: object) -> None:
        pass


# -- tests


def patch_test_members(updates: dict[str, Any]) -> Callable[[Any], Any]:
    """Give the test's instance these attributes for as long as the decorated test runs."""

    def decorate(test: Any) -> Any:
        @functools.wraps(test)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            before = {name: getattr(self, name) for name in updates}
            _set_all(self, updates)
            try:
                return test(self, *args, **kwargs)
            finally:
                _set_all(self, before)

        return wrapper

    return decorate


def _set_all(target: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(target, name, value)


def mock_wrapper(method: Any) -> Any:
    """The method, telling `.mock` of every call."""
    from unittest.mock import MagicMock

    mock = MagicMock()

    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        mock(*args, **kwargs)
        return method(self, *args, **kwargs)

    wrapper.mock = mock  # type: ignore[attr-defined]
    return wrapper


def copy_func(f: Any) -> Any:
    """A function that does the same and can be changed without changing `f`."""
    copied = types.FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__, f.__closure__)
    copied.__kwdefaults__ = f.__kwdefaults__
    return functools.update_wrapper(copied, f)


def raise_on_run_directly(file_to_call: str) -> NoReturn:
    raise RuntimeError(f"This test file is not run by itself; use: python {file_to_call} TESTNAME")


def load_tests(loader: Any, tests: Any, pattern: Any) -> unittest.TestSuite:
    """unittest's hook, for a test module to import: refuses test cases that the script only imported from elsewhere."""
    suite = unittest.TestSuite()
    for group in tests:
        for test in group:
            if not flag("DISABLE_RUNNING_SCRIPT_CHK"):
                _check_defined_in_script(test)
        if group.countTestCases():
            suite.addTest(group)
    return suite


def _check_defined_in_script(test: Any) -> None:
    script = os.path.realpath(sys.argv[0])
    home = os.path.realpath(inspect.getfile(type(test)))
    if script.endswith(".py") and home != script:
        raise AssertionError(
            f"{test.id()} is defined in {home}, not in {script} that is being run: an imported test case runs twice. "
            "Import the module instead of the class."
        )
