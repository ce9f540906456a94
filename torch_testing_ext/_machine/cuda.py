"""The abilities of the first CUDA or ROCm device, and the versions of CUDA and ROCm, for conditions of tests.

A condition is a `LazyVal`: reading its name asks no device. Its first use asks for the device's properties in another
process if this one has not initialised CUDA, so that it can still be forked into ranks.
"""

import functools
import importlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from torch_testing_ext._machine import accelerators
from torch_testing_ext._machine.flags import flag
from torch_testing_ext._machine.lazy_values import LazyVal
from torch_testing_ext._torch import fsdp_parts
from torch_testing_ext._torch.devices import accelerator_state, cuda_state

from .cuda_versions import Version, cuda_version, rocm_version

# What a process prints when a kernel's assertion has ended it, or the fault that ROCm reports instead.
DEVICE_ASSERT_MARKERS = (
    "device-side assert triggered",
    "Assertion `",
    "HSA_STATUS_ERROR_EXCEPTION",
    "Device-side assertion",
    "hipErrorLaunchFailure",
    "launch failure",
    "illegal memory access",
    "Memory access fault",
)


def has_device_side_assert(output: str) -> bool:
    """Whether the output of a process shows an assertion that failed in a kernel."""
    return any(marker in output for marker in DEVICE_ASSERT_MARKERS)


def on_cuda() -> bool:
    return bool(flag("TEST_CUDA")) and torch.version.hip is None


def on_rocm() -> bool:
    return bool(flag("TEST_CUDA")) and torch.version.hip is not None


def capability() -> Version:
    """Return the compute capability of the first device; (0, 0) without one. ROCm counts its architectures here."""
    return tuple(accelerators.cuda_properties().get("capability", (0, 0)))


@contextmanager
def answering_for_torch() -> Iterator[None]:
    """While it lasts, let torch ask for the first device's capability and architecture without initialising CUDA.

    For an import of PyTorch's own test kit, parts of which ask for them when they are imported.
    """
    if accelerators.accelerator_type() != "cuda":
        yield
        return
    with cuda_state.describing_device(capability(), accelerators.cuda_properties().get("arch", "")):
        yield


def has_triton() -> bool:
    """Whether Triton can compile for the devices here. To answer, torch would initialise CUDA in this process."""
    with answering_for_torch():
        return fsdp_parts.has_triton()


def evaluate_gfx_arch_within(arch_list: Iterable[str]) -> bool:
    """Whether ROCm's first device has one of these architectures. PyTorch lets an environment variable replace it."""
    if not flag("TEST_CUDA"):
        return False
    override = os.environ.get("PYTORCH_DEBUG_FLASH_ATTENTION_GCN_ARCH_OVERRIDE")
    if override is None:
        return has_arch_of(arch_list)
    return any(arch in override for arch in arch_list)


def has_arch_of(archs: Iterable[str]) -> bool:
    own = accelerators.cuda_properties()["arch"]
    return any(arch in own for arch in archs)


def _at_least(major: int, minor: int) -> LazyVal:
    return LazyVal(lambda: flag("TEST_CUDA") and capability() >= (major, minor))


def _exactly(wanted: Callable[[Version], bool]) -> LazyVal:
    """For NVIDIA only: the architectures of ROCm have the same numbers as some of its capabilities."""
    return LazyVal(lambda: on_cuda() and wanted(capability()))


SM53OrLater = _at_least(5, 3)
SM60OrLater = _at_least(6, 0)
SM70OrLater = _at_least(7, 0)
SM75OrLater = _at_least(7, 5)
SM80OrLater = _at_least(8, 0)
SM89OrLater = _at_least(8, 9)
SM90OrLater = _at_least(9, 0)
SM100OrLater = _at_least(10, 0)
SM120OrLater = _at_least(12, 0)
IS_SM89 = _exactly(lambda version: version == (8, 9))
IS_SM90 = _exactly(lambda version: version == (9, 0))
IS_SM100 = _exactly(lambda version: version == (10, 0))
IS_SM10X = _exactly(lambda version: version[0] == 10)
IS_SM12X = _exactly(lambda version: version[0] == 12)


def _is_thor(version: Version) -> bool:
    """Whether this is the capability of a Jetson Thor. CUDA 13 numbers this board differently."""
    return version == ((11, 0) if cuda_version() >= (13,) else (10, 1))


def _is_jetson() -> bool:
    if not flag("TEST_CUDA"):
        return False
    return capability() in ((7, 2), (8, 7)) or bool(IS_THOR)


IS_THOR = _exactly(_is_thor)
IS_JETSON = LazyVal(_is_jetson)

CUDA_ALREADY_INITIALIZED_ON_IMPORT = accelerator_state.accelerator_is_initialised()
ROCM_VERSION = LazyVal(lambda: rocm_version()[:2])


def _has_cudnn() -> bool:
    if not flag("TEST_CUDA"):
        return False
    return on_rocm() or bool(accelerators.cuda_properties()["accepts_cudnn"])


def _cudnn_version() -> int:
    return accelerators.cuda_properties().get("cudnn_version", 0) if TEST_CUDNN else 0


TEST_CUDNN = LazyVal(_has_cudnn)
TEST_CUDNN_VERSION = LazyVal(_cudnn_version)


CDNA5 = ("gfx1250",)
_CDNA3 = ("gfx942", "gfx950", *CDNA5)
_CDNA2 = ("gfx90a", *_CDNA3)


CDNA2OrLater = functools.partial(evaluate_gfx_arch_within, _CDNA2)
CDNA3OrLater = functools.partial(evaluate_gfx_arch_within, _CDNA3)
CDNA5OrLater = functools.partial(evaluate_gfx_arch_within, CDNA5)


def first_device() -> torch.device | None:
    return torch.device("cuda:0") if flag("TEST_CUDA") else None


def numba_supports_cuda() -> bool:
    if not flag("TEST_NUMBA"):
        return False
    try:
        return bool(importlib.import_module("numba.cuda").is_available())
    except (ImportError, RuntimeError, OSError):
        return False
