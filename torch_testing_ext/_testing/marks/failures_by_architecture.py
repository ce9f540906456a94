"""Failures that are expected on an architecture, decided when the test is defined."""

import functools
import unittest
from collections.abc import Callable
from typing import Any

import torch

from torch_testing_ext._machine import cuda, cuda_versions
from torch_testing_ext._machine.flags import flag
from torch_testing_ext._torch import fsdp_parts
from torch_testing_ext._torch.signs import error_texts

from .parametrized import Decorator
from .skips_at_run import xfail_where


def _xfail_on_cuda_if(condition: Callable[[], Any]) -> Decorator:
    return xfail_where(lambda: torch.version.hip is None and bool(condition()))


xfailIfSM89 = _xfail_on_cuda_if(lambda: cuda.IS_SM89)
xfailIfSM89PreCUDA13 = _xfail_on_cuda_if(lambda: cuda.IS_SM89 and cuda_versions.cuda_version() < (13, 0))
xfailIfSM90 = _xfail_on_cuda_if(lambda: cuda.IS_SM90)
xfailIfSM100OrLater = _xfail_on_cuda_if(lambda: cuda.SM100OrLater)
xfailIfSM120OrLater = _xfail_on_cuda_if(lambda: cuda.SM120OrLater)
xfailIfSM12X = _xfail_on_cuda_if(lambda: cuda.IS_SM12X)
xfailCUDAIfSM89OrLaterOnWindows = xfail_where(lambda: flag("IS_WINDOWS") and bool(cuda.SM89OrLater))
xfailIfDistributedNotSupported = xfail_where(lambda: flag("IS_MACOS") or bool(cuda.IS_JETSON))

TRITON_PTXAS_VERSION = (12, 8)


def requires_triton_ptxas_compat(fn: Any) -> Any:
    """Skip with a CUDA that is older than the assembler that comes with Triton."""
    on_cuda = torch.version.xpu is None and torch.version.hip is None
    is_too_old = on_cuda and cuda_versions.cuda_version() < TRITON_PTXAS_VERSION
    skip = unittest.skipIf(is_too_old, "Requires CUDA 12.8 to match Tritons ptxas version")
    return skip(fn)


def xfailIfNoAcceleratorTriton(test_func: Any) -> Any:
    """Skip the test, or all tests of the class, without Triton, unless it runs on the CPU.

    PyTorch's reports an expected failure, which only pytest understands; there, too, the test is not called.
    """
    if isinstance(test_func, type):
        for name, test in list(vars(test_func).items()):
            if name.startswith("test") and callable(test):
                setattr(test_func, name, xfailIfNoAcceleratorTriton(test))
        return test_func

    @functools.wraps(test_func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if fsdp_parts.has_triton():
            return test_func(*args, **kwargs)
        device = _device_of_call(args, kwargs)
        kind, _, _ = str(device).partition(":")
        if kind != "cpu":
            raise unittest.SkipTest(f"Triton not available (device={device!r})")
        try:
            return test_func(*args, **kwargs)
        except ImportError as error:
            if not error_texts.is_of_missing_triton(error):
                raise
            raise unittest.SkipTest(f"Triton not available (device={device!r}): {error}") from error

    return wrapper


def _device_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The device, or devices, that a test is called with; otherwise those of its class."""
    for name in ("device", "devices"):
        if name in kwargs:
            return kwargs[name]
    return getattr(args[0], "device_type", None) if args else None
