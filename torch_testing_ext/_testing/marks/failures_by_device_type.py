"""Failures that are expected on a type of device."""

import functools
import unittest
from typing import Any

import torch

from torch_testing_ext._machine.flags import flag

from .skips_by_device_type import skipIf


class expectedFailure:
    """The test must fail on `device_type` (all if None) with `dtype` (all if None), and pass elsewhere."""

    def __init__(self, device_type: str | None, dtype: torch.dtype | None = None) -> None:
        self.device_type = device_type
        self.dtype = dtype

    def __call__(self, fn: Any) -> Any:
        @functools.wraps(fn)
        def wrapper(test: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._applies(test, kwargs):
                return fn(test, *args, **kwargs)
            try:
                fn(test, *args, **kwargs)
            except unittest.SkipTest:
                raise
            except Exception:
                return None
            return test.fail("expected test to fail, but it passed")

        return wrapper

    def _applies(self, test: Any, arguments: dict[str, Any]) -> bool:
        device_type = getattr(test, "device_type", None) or getattr(test, "device", None)
        dtype = arguments.get("dtype", getattr(test, "dtype", None))
        return self.device_type in (None, device_type) and self.dtype in (None, dtype)


expectedFailureCPU = expectedFailure("cpu")
expectedFailureCUDA = expectedFailure("cuda")


def expectedFailureIfRocm(fn: Any) -> Any:
    return expectedFailureCUDA(fn) if flag("TEST_WITH_ROCM") else fn


expectedFailureXPU = expectedFailure("xpu")


def expectedFailureMeta(fn: Any) -> Any:
    return skipIf(flag("TEST_WITH_TORCHINDUCTOR"), "expected failures do not apply to inductor")(
        expectedFailure("meta")(fn)
    )


expectedFailureXLA = expectedFailure("xla")
expectedFailureHPU = expectedFailure("hpu")
expectedFailureMPS = expectedFailure("mps")
