"""Small helpers that PyTorch's distributed tests import from common_utils."""

from __future__ import annotations

import functools
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
from torch_testing_ext._process.whole_files import source_file

# -- tensors


def noncontiguous_like(t: torch.Tensor) -> torch.Tensor:
    """Copy a tensor with gaps between its elements, filled with conspicuous values; a non-contiguous one stays."""
    if not t.is_contiguous():
        return t
    filler = math.nan if t.dtype.is_floating_point or t.dtype.is_complex else (True if t.dtype == torch.bool else 12)
    spread = t.new_full((*t.shape, 2), filler)
    spread[..., 1] = t.detach()
    return spread[..., 1].requires_grad_(t.requires_grad)


def clone_input_helper(input: Any) -> Any:
    """Clone the tensors in a value that may contain some; sequences become tuples."""
    if isinstance(input, torch.Tensor):
        return torch.clone(input)
    if isinstance(input, Sequence) and not isinstance(input, str):
        return tuple(clone_input_helper(item) for item in input)
    return input


def to_gpu(obj: Any, type_map: dict[torch.dtype, torch.dtype] | None = None) -> Any:
    """Copy a value to the current CUDA device: tensors become new leaves, with their dtypes mapped by `type_map`."""
    if isinstance(obj, torch.Tensor):
        if not obj.is_leaf:
            raise ValueError("to_gpu copies leaf tensors only")
        dtype = (type_map or {}).get(obj.dtype, obj.dtype)
        return obj.detach().to(dtype=dtype, device="cuda", copy=True).requires_grad_(obj.requires_grad)
    if isinstance(obj, (list, tuple)):
        return type(obj)(to_gpu(item, type_map) for item in obj)
    return obj


def _gradcheck_defaults(options: dict[str, Any]) -> dict[str, Any]:
    """Check batched gradients too, in fast mode unless PYTORCH_TEST_WITH_SLOW_GRADCHECK=1."""
    defaults = {"check_batched_grad": True, "fast_mode": not flag("TEST_WITH_SLOW_GRADCHECK")}
    return {**defaults, **{name: value for name, value in options.items() if value is not None}}


def gradcheck(fn: Any, inputs: Any, **kwargs: Any) -> bool:
    """Call `torch.autograd.gradcheck` with stricter defaults."""
    return torch.autograd.gradcheck(fn, inputs, **_gradcheck_defaults(kwargs))


def gradgradcheck(fn: Any, inputs: Any, grad_outputs: Any = None, **kwargs: Any) -> bool:
    """Call `torch.autograd.gradgradcheck` with stricter defaults."""
    return torch.autograd.gradgradcheck(fn, inputs, grad_outputs, **_gradcheck_defaults(kwargs))


class BytesIOContext(io.BytesIO):
    """A buffer that stays open after a `with`."""

    def __exit__(self, *_: object) -> None:
        pass


# -- tests


def patch_test_members(updates: dict[str, Any]) -> Callable[[Any], Any]:
    """Give the test's instance these attributes while the decorated test runs."""

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
    """Wrap a method so that `.mock` records every call."""
    from unittest.mock import MagicMock

    mock = MagicMock()

    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        mock(*args, **kwargs)
        return method(self, *args, **kwargs)

    wrapper.mock = mock  # type: ignore[attr-defined]
    return wrapper


def copy_func(f: Any) -> Any:
    """Copy a function, so that its attributes can change without changing `f`."""
    copied = types.FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__, f.__closure__)
    copied.__kwdefaults__ = f.__kwdefaults__
    return functools.update_wrapper(copied, f)


def raise_on_run_directly(file_to_call: str) -> NoReturn:
    raise RuntimeError(f"This test file cannot run by itself; use: python {file_to_call} TESTNAME")


def load_tests(loader: Any, tests: Any, pattern: Any) -> unittest.TestSuite:
    """The `load_tests` hook of unittest, for a test module to import: refuses test cases defined in another file."""
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
    home = source_file(type(test))
    if script.endswith(".py") and home and os.path.realpath(home) != script:
        raise AssertionError(
            f"{test.id()} is defined in {home}, not in {script}, the script that is running: an imported test case "
            "runs twice. Import the module instead of the class."
        )
