"""Skips that are decided when the test is defined, as in PyTorch: neither the test nor its setUp runs."""

import unittest
from collections.abc import Callable
from typing import Any

import torch

from torch_testing_ext._machine.flags import flag

from . import needs
from .parametrized import Decorator, copy_of


def _skip_unless(condition: Callable[[], Any], reason: str, devices: int = 0) -> Decorator:
    """Skip where the condition does not hold; a runner leases so many devices for the test."""

    def decorate(target: Any) -> Any:
        decorated = unittest.skipUnless(condition(), reason)(target)
        return needs.declare_devices(decorated, devices) if devices else decorated

    return decorate


requires_cuda = _skip_unless(lambda: flag("TEST_CUDA"), "Requires CUDA", 1)
requires_xpu = _skip_unless(lambda: flag("TEST_XPU"), "Requires XPU", 1)


def requires_multigpu(fn: Any) -> Any:
    """Skip with fewer than two CUDA devices, and mark the test with pytest's `multigpu`."""
    return _skip_unless(lambda: flag("TEST_MULTIGPU"), "requires >= 2 GPUs", 2)(_with_pytest_mark("multigpu", fn))


def periodic(fn: Any) -> Any:
    """Skip in CI, unless PYTORCH_TEST_WITH_PERIODIC=1, and mark the test with pytest's `periodic`."""
    skip = (flag("IS_CI") or flag("IS_SANDCASTLE")) and not flag("TEST_WITH_PERIODIC")
    reason = "test is periodic; run with PYTORCH_TEST_WITH_PERIODIC to enable test"
    return unittest.skipIf(skip, reason)(_with_pytest_mark("periodic", fn))


requires_mkl = _skip_unless(lambda: flag("TEST_MKL"), "Test requires MKL")
requires_onednn = _skip_unless(lambda: flag("TEST_ONEDNN"), "Test requires OneDNN/MKLDNN")
requires_cuda_python_bindings = _skip_unless(
    lambda: flag("TEST_CUDA_PYTHON_BINDINGS"), "requires cuda-python (cuda.bindings)"
)
skipIfNoDill = _skip_unless(lambda: flag("TEST_DILL"), "no dill")
skipIfSlowGradcheckEnv = _skip_unless(
    lambda: not flag("TEST_WITH_SLOW_GRADCHECK"),
    "Tests that don't use gradcheck don't need to run on slow_gradcheck CI",
)


def skipIfNotRegistered(op_name: str, message: str) -> Decorator:
    """Always skip: the operators are those of Caffe2, which is no longer a part of PyTorch."""
    return unittest.skip("Pytorch is compiled without Caffe2")


def _torch_supports_numpy() -> bool:
    if not flag("TEST_NUMPY"):
        return False
    try:
        torch.zeros(1).numpy()
    except RuntimeError:
        return False
    return True


skipIfCompiledWithoutNumpy = _skip_unless(_torch_supports_numpy, "PyTorch was compiled without numpy support")


def _with_pytest_mark(name: str, target: Any) -> Any:
    """Mark a class, or a copy of a test function: tests with other parameters may share the function."""
    return marked(name, target if isinstance(target, type) else copy_of(target))


def marked(name: str, target: Any) -> Any:
    try:
        import pytest
    except ImportError:
        return target
    return getattr(pytest.mark, name)(target)
