"""Small helpers that PyTorch's distributed tests import from common_utils."""

from __future__ import annotations

import functools
import inspect
import io
import itertools
import math
import os
import sys
import types
import unittest
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree

from torch_testing_ext._machine.flags import flag
from torch_testing_ext._process.whole_files import source_file

GRADCHECK_NONDET_TOL = 1e-12
# The precisions that PyTorch's oldest tests assume; its name asks not to use it in new ones.
dtype2prec_DONTUSE = {torch.float: 1e-5, torch.double: 1e-5, torch.half: 1e-2, torch.bfloat16: 1e-1}


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


# -- values


def is_iterable(obj: Any) -> bool:
    try:
        iter(obj)
    except TypeError:
        return False
    return True


def is_iterable_of_tensors(iterable: Any, include_empty: bool = False) -> bool:
    """Are there only tensors in a sized iterable that is no tensor itself? `include_empty` is the answer for none."""
    if isinstance(iterable, torch.Tensor):
        return False
    try:
        if len(iterable) == 0:
            return include_empty
        return all(isinstance(item, torch.Tensor) for item in iterable)
    except TypeError:
        return False


def iter_indices(tensor: torch.Tensor) -> Iterable[Any]:
    """Iterate over the indices of all elements: numbers for a vector, none for a scalar, else tuples."""
    if tensor.dim() < 2:
        return range(tensor.numel() if tensor.dim() else 0)
    return itertools.product(*map(range, tensor.shape))


def get_function_arglist(func: Callable[..., Any]) -> list[str]:
    return inspect.getfullargspec(func).args


def get_tensors_from(args: Iterable[Any], kwargs: Mapping[str, Any]) -> set[torch.Tensor]:
    return {value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)}


# -- NumPy


_NUMPY_DTYPES = {
    "bool_": torch.bool,
    "uint8": torch.uint8,
    "uint16": torch.uint16,
    "uint32": torch.uint32,
    "uint64": torch.uint64,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "complex64": torch.complex64,
    "complex128": torch.complex128,
}


def numpy_to_torch_dtypes() -> dict[Any, torch.dtype]:
    """Map NumPy's scalar types to torch's dtypes. Imports NumPy."""
    import numpy

    return {getattr(numpy, name): dtype for name, dtype in _NUMPY_DTYPES.items()}


def torch_to_numpy_dtypes() -> dict[torch.dtype, Any]:
    """Map torch's dtypes to NumPy's scalar types, two of them to larger ones. Imports NumPy."""
    import numpy

    same = {dtype: scalar for scalar, dtype in numpy_to_torch_dtypes().items()}
    return {**same, torch.bfloat16: numpy.float32, torch.complex32: numpy.complex64}


def numpy_to_torch_dtype(np_dtype: Any) -> torch.dtype:
    """Return torch's dtype for a scalar type or a dtype of NumPy; a KeyError if there is none."""
    known = numpy_to_torch_dtypes()
    return known[np_dtype] if np_dtype in known else known[np_dtype.type]


def has_corresponding_torch_dtype(np_dtype: Any) -> bool:
    try:
        numpy_to_torch_dtype(np_dtype)
    except KeyError:
        return False
    return True


# -- outputs and gradients


def outs_and_grads(fn: Callable[..., Any], graph_inps: Sequence[Any], inps: Any) -> tuple[Any, list[Any]]:
    """Call `fn(*graph_inps)` and run backward from all outputs. Return these and the gradients of `inps`, now reset."""
    outputs = fn(*graph_inps)
    for output in _tensors(outputs):
        if output.requires_grad:
            torch.autograd.backward(output.sum(), retain_graph=True)
    gradients = [tensor.grad for tensor in _tensors(inps)]
    for tensor in _tensors(inps):
        tensor.grad = None
    return outputs, gradients


def compare_equal_outs_and_grads(
    test: Any, m1: Callable[..., Any], m2: Callable[..., Any], inps: Sequence[Any]
) -> None:
    """Assert that two functions have the same outputs and gradients for these inputs."""
    (outputs, gradients), (other_outputs, other_gradients) = (outs_and_grads(fn, inps, inps) for fn in (m1, m2))
    test.assertEqual(outputs, other_outputs)
    test.assertEqual(gradients, other_gradients)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor))
