"""Limits on where a test runs: types of device, numbers of devices, memory."""

import gc
import unittest
from collections.abc import Callable, Iterable
from typing import Any

import torch

from torch_testing_ext._machine import machine_memory
from torch_testing_ext._machine.flags import flag
from torch_testing_ext._torch.devices import accelerator_state

from . import needs, skips
from .device_types import GIBIBYTE, Decorator, Target, native_devices, skip_unless

# These need this much more memory than the test itself: sanitizers keep shadow copies.
_SANITIZER_FACTOR = 10


class onlyOn:
    """Runs the test on one type of device, or on several, only."""

    def __init__(self, device_type: Target) -> None:
        self.device_type = device_type

    def __call__(self, fn: Any) -> Any:
        def runs_on(test: Any) -> bool:
            restricted = not getattr(test, "bypass_device_restrictions", False)
            # PyTorch looks for the type as a part of the text, too: "cuda" is in "cuda,xpu".
            return test.device_type in self.device_type or not restricted

        return skip_unless(runs_on, lambda test: f"Only runs on {self.device_type}")(fn)


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
onlyAccelerator = skip_unless(
    lambda test: test.device_type not in ("cpu", "meta"),
    lambda test: "onlyAccelerator: doesn't run on CPU or meta devices",
)


def _is_on_cuda_or_extension(test: Any) -> bool:
    return test.device_type in ("cuda", accelerator_state.extension_device_type())


onlyCUDAAndPRIVATEUSE1 = skip_unless(
    _is_on_cuda_or_extension,
    lambda test: f"onlyCUDAAndPRIVATEUSE1: doesn't run on {test.device_type}",
)
# Run the test on the types of device that PyTorch itself implements only.
onlyNativeDeviceTypes = skip_unless(
    lambda test: test.device_type in native_devices(),
    lambda test: f"onlyNativeDeviceTypes: doesn't run on {test.device_type}",
)


def onlyNativeDeviceTypesAnd(devices: Iterable[str] | None = None) -> Decorator:
    also = tuple(devices or ())
    return skip_unless(
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
