"""The device types on which a test runs, once on each, and on which it is to fail.

The decorators act on the attribute `device_type` of the test's class, which a class may set itself.
"""

import functools
import gc
import unittest
from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext
from typing import Any

import torch

from torch_testing_ext._machine import machine_memory
from torch_testing_ext._machine.flags import flag
from torch_testing_ext._torch.devices import accelerator_state, build_options

from . import needs, skips

Decorator = Callable[[Any], Any]
# A condition of the test case that is about to run, and a text made of it.
_RunsOn = Callable[[Any], bool]
_Reason = Callable[[Any], str]
Target = str | Collection[str]

GIBIBYTE = 1 << 30
# Untyped in torch.
_backends: Any = torch.backends
# These need this much more memory than the test itself: sanitizers keep shadow copies.
_SANITIZER_FACTOR = 10


def native_devices() -> tuple[str, ...]:
    """The types of device that PyTorch itself implements, and the one that an extension has registered."""
    return ("cpu", "cuda", "xpu", "meta", "mps", "mtia", accelerator_state.extension_device_type())


def _skip_unless(runs_on: _RunsOn, reason: _Reason) -> Decorator:
    def why(test: Any, *args: Any, **kwargs: Any) -> str | None:
        return None if runs_on(test) else reason(test)

    return skips.skip_for(why)


# -- skips by type of device


class skipIf:
    """Skips the test on `device_type` (all if None) where `dep` holds.

    `dep` is a bool, or the name of an attribute of the class, which counts as true if the class lacks it.
    """

    def __init__(self, dep: bool | str, reason: str, device_type: Target | None = None) -> None:
        self.dep = dep
        self.reason = reason
        self.device_type = device_type

    def __call__(self, fn: Any) -> Any:
        return _skip_unless(lambda test: not self._holds(test), lambda test: self.reason)(fn)

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

    elsewhere = _skip_unless(runs_on, lambda test: f"skipCUDAIfRocm: {msg}")
    return skips.bare_or_called(func, elsewhere)


skipCUDAIfNotRocm = _skip_unless(
    lambda test: test.device_type != "cuda" or bool(flag("TEST_WITH_ROCM")), lambda test: "test requires ROCm"
)


# -- where a test runs


class onlyOn:
    """Runs the test on one type of device, or on several, only."""

    def __init__(self, device_type: Target) -> None:
        self.device_type = device_type

    def __call__(self, fn: Any) -> Any:
        def runs_on(test: Any) -> bool:
            restricted = not getattr(test, "bypass_device_restrictions", False)
            # PyTorch looks for the type as a part of the text, too: "cuda" is in "cuda,xpu".
            return test.device_type in self.device_type or not restricted

        return _skip_unless(runs_on, lambda test: f"Only runs on {self.device_type}")(fn)


onlyCPU = onlyOn("cpu")
onlyCUDA = onlyOn("cuda")
onlyMPS = onlyOn("mps")
onlyXPU = onlyOn("xpu")
onlyHPU = onlyOn("hpu")


def onlyPRIVATEUSE1(fn: Any) -> Any:
    device_type = accelerator_state.extension_device_type()
    if getattr(torch, device_type, None) is None:
        return unittest.skip(f"Skip as torch has no module of {device_type}")(fn)
    return onlyOn(device_type)(fn)


# Run the test on accelerators only: neither on CPU nor on the meta device.
onlyAccelerator = _skip_unless(
    lambda test: test.device_type not in ("cpu", "meta"),
    lambda test: "onlyAccelerator: doesn't run on CPU or meta devices",
)


def _is_on_cuda_or_extension(test: Any) -> bool:
    return test.device_type in ("cuda", accelerator_state.extension_device_type())


onlyCUDAAndPRIVATEUSE1 = _skip_unless(
    _is_on_cuda_or_extension,
    lambda test: f"onlyCUDAAndPRIVATEUSE1: doesn't run on {test.device_type}",
)
# Run the test on the types of device that PyTorch itself implements only.
onlyNativeDeviceTypes = _skip_unless(
    lambda test: test.device_type in native_devices(),
    lambda test: f"onlyNativeDeviceTypes: doesn't run on {test.device_type}",
)


def onlyNativeDeviceTypesAnd(devices: Iterable[str] | None = None) -> Decorator:
    also = tuple(devices or ())
    return _skip_unless(
        lambda test: test.device_type in (*native_devices(), *also),
        lambda test: f"onlyNativeDeviceTypesAnd {devices} : doesn't run on {test.device_type}",
    )


class deviceCountAtLeast:
    """Passes all devices of the class's type as `devices`, and skips the test if they are fewer than a number."""

    def __init__(self, num_required_devices: int) -> None:
        self.num_required_devices = num_required_devices

    def __call__(self, fn: Any) -> Any:
        """Decorate a test."""
        if hasattr(fn, "num_required_devices"):
            raise AssertionError(f"deviceCountAtLeast redefinition for {fn.__name__}")
        fn.num_required_devices = self.num_required_devices

        def why(test: Any, devices: Any, *args: Any, **kwargs: Any) -> str | None:
            are_enough = len(devices) >= self.num_required_devices
            return None if are_enough else f"fewer than {self.num_required_devices} devices detected"

        wrapper = skips.skip_for(why)(fn)
        # A runner leases that many devices; the check above is by type of device, so it stays.
        need = needs.Need(lambda: None, devices=self.num_required_devices, allow_cpu=True)
        all_needs = (need, *needs.needs_of(fn))
        setattr(wrapper, needs.ATTRIBUTE, all_needs)
        return wrapper


def largeTensorTest(
    size: int | str | Callable[..., int], device: str | None = None, inductor: bool = False
) -> Decorator:
    """Skip the test unless its device has that much memory free.

    `size`: bytes, "N GB", or a function of the test's arguments.
    """
    if isinstance(size, str) and not size.endswith(("GB", "gb")):
        raise AssertionError(f"only bytes or GB supported, got {size!r}")
    needed = GIBIBYTE * int(size[:-2]) if isinstance(size, str) else size

    def why(self: Any, *args: Any, **kwargs: Any) -> str | None:
        place = device or _device_of(self)
        wanted = needed(self, *args, **kwargs) if callable(needed) else needed
        return None if _has_sufficient_memory(place, wanted) else f"Insufficient {place} memory"

    return skips.skip_for(why)


def _device_of(test: Any) -> str:
    device: str = test.get_primary_device() if hasattr(test, "get_primary_device") else test.device
    return device


def _has_sufficient_memory(device: str, size: int) -> bool:
    """Whether a device has as many bytes free. Skips the test where that is not known."""
    place = torch.device(device)
    if place.type in ("cuda", "xpu", accelerator_state.extension_device_type()):
        return _has_device_memory(place, size)
    if place.type not in ("cpu", "mps"):
        raise unittest.SkipTest(f"the free memory of {place.type} is not known")
    sanitizers = ("TEST_WITH_ASAN", "TEST_WITH_TSAN", "TEST_WITH_UBSAN")
    if any(flag(name) for name in sanitizers):
        size *= _SANITIZER_FACTOR
    gc.collect()
    use = machine_memory.MachineMemory().of_machine()
    if use is None:
        raise unittest.SkipTest("the free memory of this system is not known")
    free = use.limit - use.used
    return free >= size


def _has_device_memory(place: torch.device, size: int) -> bool:
    """Whether an accelerator has as many bytes free, of those that this process may use."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return False
    if accelerator.type != place.type:
        return True
    gc.collect()
    torch.accelerator.empty_cache()
    index = place.index or 0
    free, _ = torch.get_device_module(place.type).mem_get_info(index)
    is_cuda = place.type == "cuda"
    share = torch.cuda.memory.get_per_process_memory_fraction(index) if is_cuda else 1
    return bool(free * share >= size)


# -- expected failures


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


# -- backends of an operation


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
