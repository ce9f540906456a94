"""The types of device, and the choice of those that tests run on.

Importing this module touches no accelerator, and neither does a class for one: it asks its device when it is set up.
"""

import os
from collections.abc import Collection, Iterable
from typing import Any, ClassVar

import torch

from torch_testing_ext._machine import accelerators
from torch_testing_ext._machine.flags import flag
from torch_testing_ext._torch.devices import accelerator_state

from .device_type_base import PRIVATEUSE1 as _PRIVATEUSE1, DeviceTypeTestBase, type_name as _type_name

# Keeps these frames out of unittest's tracebacks.
__unittest = True

PYTORCH_TESTING_DEVICE_ONLY_FOR_KEY = "PYTORCH_TESTING_DEVICE_ONLY_FOR"
PYTORCH_TESTING_DEVICE_EXCEPT_FOR_KEY = "PYTORCH_TESTING_DEVICE_EXCEPT_FOR"
PYTORCH_TESTING_DEVICE_FOR_CUSTOM_KEY = "PYTORCH_TESTING_DEVICE_FOR_CUSTOM"
_cuda: Any = torch.cuda
_xpu: Any = torch.xpu


class CPUTestBase(DeviceTypeTestBase):
    """The base of tests on CPU."""

    device_type = "cpu"


class _IndexedTestBase(DeviceTypeTestBase):
    """The base of tests on devices that have an index."""

    # setUpClass asks for the current device; before that, without touching the device, the first one is assumed.
    primary_device: ClassVar[str] = ""

    @classmethod
    def get_primary_device(cls) -> str:
        return cls.primary_device or f"{_type_name(cls.device_type)}:0"

    @classmethod
    def get_all_devices(cls) -> list[str]:
        primary = cls.get_primary_device()
        kind, _, _ = primary.partition(":")
        devices = [f"{kind}:{index}" for index in range(cls._device_count())]
        others = [device for device in devices if device != primary]
        return [primary, *others]

    @classmethod
    def _device_count(cls) -> int:
        return accelerators.device_count() if accelerators.accelerator_type() == cls.device_type else 1


class CUDATestBase(_IndexedTestBase):
    """The base of tests on CUDA devices."""

    device_type = "cuda"
    no_magma: ClassVar[bool] = True
    no_cudnn: ClassVar[bool] = True
    cudnn_version: ClassVar[int | None] = None

    def has_cudnn(self) -> bool:
        return not self.no_cudnn

    @classmethod
    def setUpClass(cls) -> None:
        # Another process answers: if this one initialised CUDA, a class of ranks could no longer fork them.
        properties = accelerators.cuda_properties()
        cls.no_magma = not properties.get("has_magma")
        cls.no_cudnn = not properties.get("accepts_cudnn")
        cls.cudnn_version = None if cls.no_cudnn else properties.get("cudnn_version")
        cls.primary_device = f"cuda:{torch.cuda.current_device() if _cuda.is_initialized() else 0}"

    def _should_stop_test_suite(self) -> bool:
        try:
            if _cuda.is_initialized():
                torch.cuda.synchronize()
        except RuntimeError:
            return True
        return False


class XPUTestBase(_IndexedTestBase):
    """The base of tests on XPU devices."""

    device_type = "xpu"

    @classmethod
    def setUpClass(cls) -> None:
        cls.primary_device = f"xpu:{torch.xpu.current_device() if _xpu.is_initialized() else 0}"


class HPUTestBase(_IndexedTestBase):
    """The base of tests on HPU devices."""

    device_type = "hpu"


class MPSTestBase(_IndexedTestBase):
    """The base of tests on MPS."""

    device_type = "mps"


class PrivateUse1TestBase(_IndexedTestBase):
    """The base of tests on the device of an extension."""

    device_type = _PRIVATEUSE1

    @classmethod
    def setUpClass(cls) -> None:
        # A test's class, not this base, becomes one of the extension's type: PyTorch changes the base.
        name = accelerator_state.extension_device_type()
        cls.device_type = name
        module = getattr(torch, name)
        may_ask = getattr(module, "is_initialized", lambda: True)()
        cls.primary_device = f"{name}:{module.current_device() if may_ask else 0}"

    @classmethod
    def _device_count(cls) -> int:
        return int(getattr(torch, accelerator_state.extension_device_type()).device_count())


def get_device_type_test_bases() -> list[type[DeviceTypeTestBase]]:
    """The bases of the types of device that this machine has; XPU, MPS and HPU only where tests ask for them."""
    bases: list[type[DeviceTypeTestBase]] = [CPUTestBase]
    if flag("TEST_CUDA"):
        bases.append(CUDATestBase)
    if is_privateuse1_backend_available():
        bases.append(PrivateUse1TestBase)
    return bases


def is_privateuse1_backend_available() -> bool:
    module = getattr(torch, accelerator_state.extension_device_type(), None)
    return bool(module is not None and module.is_available())


def remove_device_and_dtype_suffixes(test_name: str) -> str:
    """Return the name that a test had before it was made for a type of device and a dtype."""
    rest, _, dtype = test_name.rpartition("_")
    if not isinstance(getattr(torch, dtype, None), torch.dtype):
        return test_name
    name, _, device = rest.rpartition("_")
    devices = {base.device_type for base in get_device_type_test_bases()}
    return name if device in devices else rest


def filter_desired_device_types(
    device_type_test_bases: Iterable[type[DeviceTypeTestBase]],
    except_for: str | Collection[str] | None = None,
    only_for: str | Collection[str] | None = None,
) -> list[type[DeviceTypeTestBase]]:
    """The bases whose type of device is in `only_for`, if that is given, and not in `except_for`."""
    without = _types(except_for)
    only = _types(only_for)
    both = without & only
    if both:
        raise AssertionError(f"device ({both}) appeared in both except_for and only_for")
    chosen = []
    for base in device_type_test_bases:
        kind = _generic_name(base.device_type)
        if kind not in without and (not only or kind in only):
            chosen.append(base)
    return chosen


def _types(given: str | Collection[str] | None) -> set[str]:
    device_types = [given] if isinstance(given, str) else given or ()
    return {_generic_name(device_type) for device_type in device_types}


def _generic_name(device_type: str) -> str:
    """The device of an extension is always called privateuse1 here."""
    return _PRIVATEUSE1 if device_type == accelerator_state.extension_device_type() else device_type


def get_desired_device_type_test_bases(
    except_for: str | Collection[str] | None = None,
    only_for: str | Collection[str] | None = None,
    include_lazy: bool = False,
    allow_mps: bool = False,
    allow_xpu: bool = False,
) -> list[type[DeviceTypeTestBase]]:
    """The bases that a call of `instantiate_device_type_tests` with these arguments uses, after the environment."""
    if include_lazy:
        raise NotImplementedError("lazy tensors are not supported here: use PyTorch's own common_device_type")
    bases = get_device_type_test_bases()
    for wanted, name, base in (
        (allow_mps, "TEST_MPS", MPSTestBase),
        (allow_xpu, "TEST_XPU", XPUTestBase),
        (True, "TEST_HPU", HPUTestBase),
    ):
        if wanted and flag(name):
            bases.append(base)
    chosen = filter_desired_device_types(bases, except_for, only_for)
    custom = _in_environment(PYTORCH_TESTING_DEVICE_FOR_CUSTOM_KEY)
    chosen += [base for base in bases if base.device_type in custom and base not in chosen]
    return filter_desired_device_types(
        chosen,
        _in_environment(PYTORCH_TESTING_DEVICE_EXCEPT_FOR_KEY),
        _in_environment(PYTORCH_TESTING_DEVICE_ONLY_FOR_KEY),
    )


def _in_environment(key: str) -> list[str]:
    device_types = os.environ.get(key, "").split(",")
    return [device_type for device_type in device_types if device_type]


def get_all_device_types() -> list[str]:
    return ["cpu", "cuda"] if flag("TEST_CUDA") else ["cpu"]
