"""Decorators for tests that run once for each type of device: the dtypes they run with, and their tolerances."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch

from torch_testing_ext import _torch


class dtypes:
    """Runs the test once for each dtype, or tuple of dtypes, passed as `dtype`; on one type of device or on all."""

    def __init__(self, *args: Any, device_type: str = "all") -> None:
        if args and isinstance(args[0], (list, tuple)):
            for arg in args:
                if not isinstance(arg, (list, tuple)):
                    raise AssertionError(
                        f"if one variant is a tuple or list of dtypes, all must be; {arg} is a {type(arg).__name__}"
                    )
            flat = [dtype for arg in args for dtype in arg]
        else:
            flat = list(args)
        if not all(isinstance(dtype, torch.dtype) for dtype in flat):
            raise AssertionError(f"Unknown dtype in {args}")
        self.args = args
        self.device_type = device_type

    def __call__(self, fn: Any) -> Any:
        given = getattr(fn, "dtypes", {})
        if self.device_type in given:
            raise AssertionError(f"dtypes redefinition for {self.device_type}")
        given[self.device_type] = self.args
        fn.dtypes = given
        return fn


class dtypesIfCPU(dtypes):
    """Replaces the dtypes on CPU."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, device_type="cpu")


class dtypesIfCUDA(dtypes):
    """Replaces the dtypes on CUDA."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, device_type="cuda")


class dtypesIfXPU(dtypes):
    """Replaces the dtypes on XPU."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, device_type="xpu")


class dtypesIfMPS(dtypes):
    """Replaces the dtypes on MPS."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, device_type="mps")


class dtypesIfHPU(dtypes):
    """Replaces the dtypes on HPU."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, device_type="hpu")


class dtypesIfPRIVATEUSE1(dtypes):
    """Replaces the dtypes on the device of an extension."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, device_type=_torch.built_with.extension_device_type())


tol = namedtuple("tol", ["atol", "rtol"])


class precisionOverride:
    """The tests of these dtypes compare with at least these absolute tolerances."""

    def __init__(self, d: dict[torch.dtype, float]) -> None:
        if not isinstance(d, dict):
            raise AssertionError("precisionOverride not given a dtype : precision dict!")
        for dtype in d:
            if not isinstance(dtype, torch.dtype):
                raise AssertionError(f"precisionOverride given unknown dtype {dtype}")
        self.d = d

    def __call__(self, fn: Any) -> Any:
        fn.precision_overrides = self.d
        return fn


class toleranceOverride:
    """The tests of these dtypes compare with at least these tolerances: `tol(atol=..., rtol=...)`."""

    def __init__(self, d: dict[torch.dtype, Any]) -> None:
        if not isinstance(d, dict):
            raise AssertionError("toleranceOverride not given a dtype : tol dict!")
        for dtype, tolerance in d.items():
            if not isinstance(dtype, torch.dtype):
                raise AssertionError(f"toleranceOverride given unknown dtype {dtype}")
            if not isinstance(tolerance, tol):
                raise AssertionError("toleranceOverride not given a dtype : tol dict!")
        self.d = d

    def __call__(self, fn: Any) -> Any:
        fn.tolerance_overrides = self.d
        return fn
