"""Skips by the type of device that a test runs on."""

from collections.abc import Callable
from typing import Any

from torch_testing_ext._machine.flags import flag
from torch_testing_ext._torch.devices import accelerator_state

from . import skips
from .device_types import Target, skip_unless


class skipIf:
    """Skips the test on `device_type` (all if None) where `dep` holds.

    `dep` is a bool, or the name of an attribute of the class, which counts as true if the class lacks it.
    """

    def __init__(self, dep: bool | str, reason: str, device_type: Target | None = None) -> None:
        self.dep = dep
        self.reason = reason
        self.device_type = device_type

    def __call__(self, fn: Any) -> Any:
        return skip_unless(lambda test: not self._holds(test), lambda test: self.reason)(fn)

    def _holds(self, test: Any) -> bool:
        chosen = (self.device_type,) if isinstance(self.device_type, str) else self.device_type
        if chosen is not None and test.device_type not in chosen:
            return False
        if isinstance(self.dep, str):
            return bool(getattr(test, self.dep, True))
        return self.dep is True


def _skip_on(device_type: Target | Callable[[], Target]) -> Callable[[bool | str, str], skipIf]:
    def decorator(dep: bool | str, reason: str) -> skipIf:
        chosen = device_type() if callable(device_type) else device_type
        return skipIf(dep, reason, device_type=chosen)

    return decorator


skipCPUIf = _skip_on("cpu")
skipCUDAIf = _skip_on("cuda")
skipXPUIf = _skip_on("xpu")
skipGPUIf = _skip_on(("cuda", "xpu", "mps"))
skipLazyIf = _skip_on("lazy")
skipMetaIf = _skip_on("meta")
skipMPSIf = _skip_on("mps")
skipHPUIf = _skip_on("hpu")
skipXLAIf = _skip_on("xla")
skipPRIVATEUSE1If = _skip_on(accelerator_state.extension_device_type)

skipLazy = skipLazyIf(True, "test doesn't work with lazy tensors")
skipMeta = skipMetaIf(True, "test doesn't work with meta tensors")
skipXLA = skipXLAIf(True, "Marked as skipped for XLA")
skipMPS = skipMPSIf(True, "test doesn't work on MPS backend")
skipHPU = skipHPUIf(True, "test doesn't work on HPU backend")
skipXPU = skipXPUIf(True, "test doesn't work on XPU backend")


def skipPRIVATEUSE1(fn: Any) -> Any:
    return skipPRIVATEUSE1If(True, "test doesn't work on privateuse1 backend")(fn)


def skipCUDAIfRocm(func: Any = None, *, msg: str = "test doesn't currently work on the ROCm stack") -> Any:
    def runs_on(test: Any) -> bool:
        return test.device_type != "cuda" or not flag("TEST_WITH_ROCM")

    elsewhere = skip_unless(runs_on, lambda test: f"skipCUDAIfRocm: {msg}")
    return skips.bare_or_called(func, elsewhere)


skipCUDAIfNotRocm = skip_unless(
    lambda test: test.device_type != "cuda" or bool(flag("TEST_WITH_ROCM")), lambda test: "test requires ROCm"
)
