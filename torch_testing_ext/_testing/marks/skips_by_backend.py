"""Skips where a backend of an operation is missing."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from torch_testing_ext._torch.devices import build_options

from .device_types import Decorator
from .skips_by_device_type import skipCPUIf, skipCUDAIf

# Untyped in torch.
_backends: Any = torch.backends


def _without(backend: Any, is_used: Callable[[Any], bool]) -> Decorator:
    """Run the test without a backend, where it would be used."""

    def decorate(fn: Any) -> Any:
        @functools.wraps(fn)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            without = backend.flags(enabled=False) if is_used(self) else nullcontext()
            with without:
                return fn(self, *args, **kwargs)

        return wrapper

    return decorate


def _uses_cudnn(test: Any) -> bool:
    if test.device_type != "cuda" or not hasattr(test, "has_cudnn"):
        return False
    return bool(test.has_cudnn())


disablecuDNN = _without(_backends.cudnn, _uses_cudnn)
disableMkldnn = _without(_backends.mkldnn, lambda test: bool(_backends.mkldnn.is_available()))


skipCPUIfNoLapack = skipCPUIf(not build_options.has_lapack(), "PyTorch compiled without Lapack")
skipCPUIfNoMkl = skipCPUIf(not _backends.mkl.is_available(), "PyTorch is built without MKL support")
skipCPUIfNoMkldnn = skipCPUIf(not _backends.mkldnn.is_available(), "PyTorch is built without mkldnn support")
skipCUDAIfNoCudnn = skipCUDAIf("no_cudnn", "cuDNN not available")
skipCUDAIfNoMagma = skipCUDAIf("no_magma", "no MAGMA library detected")
