"""Small helpers that PyTorch's distributed tests import from common_utils."""

import functools
import os
import sys
import unittest
from enum import Enum
from typing import Any, NoReturn

import torch

from torch_testing_ext._machine.flags import flag
from torch_testing_ext._tests.source_files import source_file

GRADCHECK_NONDET_TOL = 1e-12
# The precisions that PyTorch's oldest tests assume; its name asks not to use it in new ones.
dtype2prec_DONTUSE = {torch.float: 1e-5, torch.double: 1e-5, torch.half: 1e-2, torch.bfloat16: 1e-1}


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


_NUMPY_SCALARS = "bool_ uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 float32 float64 complex64 complex128"


def numpy_to_torch_dtypes() -> dict[Any, torch.dtype]:
    """Map NumPy's scalar types to torch's dtypes. Imports NumPy."""
    import numpy

    return {getattr(numpy, name): getattr(torch, name.rstrip("_")) for name in _NUMPY_SCALARS.split()}


def torch_to_numpy_dtypes() -> dict[torch.dtype, Any]:
    """Map torch's dtypes to NumPy's scalar types, two of them to larger ones. Imports NumPy."""
    import numpy

    same = {dtype: scalar for scalar, dtype in numpy_to_torch_dtypes().items()}
    return {**same, torch.bfloat16: numpy.float32, torch.complex32: numpy.complex64}


class HardwareClassification(Enum):
    """The hardware that a test class is for: any (GENERIC), every accelerator, or devices of one type."""

    GENERIC = "generic"
    ACCELERATOR = "accelerator"
    CPU = "cpu"
    CUDA = "cuda"
    MPS = "mps"
    XPU = "xpu"


def get_hw_classification(test_case_cls: type) -> HardwareClassification | None:
    """Return a test class's own declaration; None without one."""
    declared = getattr(test_case_cls, "hw_classification", None)
    if declared is None or isinstance(declared, HardwareClassification):
        return declared
    name = f"{test_case_cls.__module__}.{test_case_cls.__name__}"
    raise TypeError(f"{name}.hw_classification must be a HardwareClassification")
