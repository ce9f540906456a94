"""The dtypes of tests that run once for each type of device, and their tolerances."""

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch

from torch_testing_ext._torch.devices import accelerator_state


class dtypes:
    """Runs the test once for each dtype, or tuple of dtypes, passed as `dtype`; on one type of device or on all."""

    def __init__(self, *args: Any, device_type: str = "all") -> None:
        flat: list[Any] = list(args)
        if args and isinstance(args[0], (list, tuple)):
            flat = []
            for arg in args:
                if not isinstance(arg, (list, tuple)):
                    raise AssertionError(
                        f"if one variant is a tuple or list of dtypes, all must be; {arg} is a {type(arg).__name__}"
                    )
                flat.extend(arg)
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


def _dtypes_on(device_type: str | Callable[[], str]) -> Callable[..., dtypes]:
    """A decorator that replaces the dtypes on one type of device."""

    def decorator(*args: Any) -> dtypes:
        kind = device_type() if callable(device_type) else device_type
        return dtypes(*args, device_type=kind)

    return decorator


dtypesIfCPU = _dtypes_on("cpu")
dtypesIfCUDA = _dtypes_on("cuda")
dtypesIfXPU = _dtypes_on("xpu")
dtypesIfMPS = _dtypes_on("mps")
dtypesIfHPU = _dtypes_on("hpu")
dtypesIfPRIVATEUSE1 = _dtypes_on(accelerator_state.extension_device_type)

tol = namedtuple("tol", ["atol", "rtol"])


class precisionOverride:
    """The tests of these dtypes compare with at least these absolute tolerances."""

    _attribute, _what = "precision_overrides", "precision"

    def __init__(self, d: dict[torch.dtype, Any]) -> None:
        name = type(self).__name__
        if not isinstance(d, dict):
            raise AssertionError(f"{name} not given a dtype : {self._what} dict!")
        for dtype in d:
            if not isinstance(dtype, torch.dtype):
                raise AssertionError(f"{name} given unknown dtype {dtype}")
        self.d = d

    def __call__(self, fn: Any) -> Any:
        setattr(fn, self._attribute, self.d)
        return fn


class toleranceOverride(precisionOverride):
    """The tests of these dtypes compare with at least these tolerances: `tol(atol=..., rtol=...)`."""

    _attribute, _what = "tolerance_overrides", "tol"

    def __init__(self, d: dict[torch.dtype, Any]) -> None:
        super().__init__(d)
        if not all(isinstance(tolerance, tol) for tolerance in d.values()):
            raise AssertionError("toleranceOverride not given a dtype : tol dict!")
