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

Version = tuple[int, ...]

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


# -- versions


def cuda_version() -> Version:
    """Return the version of CUDA that torch was built with; (0, 0) without CUDA."""
    return _numbers(torch.version.cuda or "0.0")


def rocm_version() -> Version:
    """Return the release of ROCm, all its numbers; (0, 0) without ROCm."""
    # HIP's version is that of ROCm, except in previews. Before torch 2.15, it is the only one that torch records.
    return _numbers(getattr(torch.version, "rocm", None) or torch.version.hip or "0.0")


def magma_version() -> Version:
    """Return the version of MAGMA that torch was built with; (0, 0) without MAGMA."""
    _, _, after = torch.__config__.show().partition("Magma ")
    if not after:
        return 0, 0
    version, *_ = after.splitlines()
    return _numbers(version)


def _numbers(version: str) -> Version:
    release, _, _ = version.partition("-")
    return tuple(int(part) for part in release.split("."))


# -- the device


def _on_cuda() -> bool:
    return bool(flag("TEST_CUDA")) and torch.version.hip is None


def _on_rocm() -> bool:
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
        return _has_arch_of(arch_list)
    return any(arch in override for arch in arch_list)


def _has_arch_of(archs: Iterable[str]) -> bool:
    own = accelerators.cuda_properties()["arch"]
    return any(arch in own for arch in archs)


def _at_least(major: int, minor: int) -> LazyVal:
    return LazyVal(lambda: flag("TEST_CUDA") and capability() >= (major, minor))


def _exactly(wanted: Callable[[Version], bool]) -> LazyVal:
    """For NVIDIA only: the architectures of ROCm have the same numbers as some of its capabilities."""
    return LazyVal(lambda: _on_cuda() and wanted(capability()))


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
    return _on_rocm() or bool(accelerators.cuda_properties()["accepts_cudnn"])


def _cudnn_version() -> int:
    return accelerators.cuda_properties().get("cudnn_version", 0) if TEST_CUDNN else 0


TEST_CUDNN = LazyVal(_has_cudnn)
TEST_CUDNN_VERSION = LazyVal(_cudnn_version)


_CDNA5 = ("gfx1250",)
_CDNA3 = ("gfx942", "gfx950", *_CDNA5)
_CDNA2 = ("gfx90a", *_CDNA3)


CDNA2OrLater = functools.partial(evaluate_gfx_arch_within, _CDNA2)
CDNA3OrLater = functools.partial(evaluate_gfx_arch_within, _CDNA3)
CDNA5OrLater = functools.partial(evaluate_gfx_arch_within, _CDNA5)


def first_device() -> torch.device | None:
    return torch.device("cuda:0") if flag("TEST_CUDA") else None


def numba_supports_cuda() -> bool:
    if not flag("TEST_NUMBA"):
        return False
    try:
        return bool(importlib.import_module("numba.cuda").is_available())
    except (ImportError, RuntimeError, OSError):
        return False


# -- what the platform supports

_WITH_AOTRITON: tuple[str, ...] = ("gfx90a", "gfx942", "gfx1100", "gfx1201", "gfx950")
_WITH_EXPERIMENTAL_AOTRITON = ("gfx1101", "gfx1102", "gfx1150", "gfx1151", "gfx1200")


def _has_aotriton() -> bool:
    archs = _WITH_AOTRITON
    if os.environ.get("TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL", "0") != "0":
        archs += _WITH_EXPERIMENTAL_AOTRITON
    return evaluate_gfx_arch_within(archs)


def _xpu_has_flash_attention() -> bool:
    """The architectures from Xe2 on have it: those of Battlemage, all of whose models have numbers like this."""
    return not flag("IS_WINDOWS") and accelerators.xpu_device_id() >> 8 == 0xE2


def evaluate_platform_supports_flash_attention() -> bool:
    if flag("TEST_WITH_ROCM"):
        return _has_aotriton()
    if flag("TEST_CUDA"):
        return bool(SM80OrLater)
    if flag("TEST_XPU"):
        return bool(PLATFORM_SUPPORTS_FLASH_ATTENTION_XPU)
    return bool(flag("TEST_MTIA"))


def evaluate_platform_supports_efficient_attention() -> bool:
    if flag("TEST_WITH_ROCM"):
        return _has_aotriton()
    return any(map(flag, ("TEST_CUDA", "TEST_XPU", "TEST_MTIA")))


def evaluate_platform_supports_cudnn_attention() -> bool:
    return not flag("TEST_WITH_ROCM") and bool(SM80OrLater) and int(TEST_CUDNN_VERSION) >= 90000


def evaluate_platform_supports_bf16() -> bool:
    if torch.version.cuda is not None:
        return bool(SM80OrLater)
    return torch.version.hip is not None or bool(flag("TEST_XPU"))


def evaluate_platform_supports_bf16_atomics() -> bool:
    if torch.version.cuda is not None:
        return bool(SM80OrLater)
    return torch.version.hip is not None and rocm_version() >= (8, 0)


def evaluate_platform_supports_half_atomics() -> bool:
    return torch.version.hip is None or rocm_version() >= (8, 0)


def evaluate_platform_supports_fp8() -> bool:
    """True also without an accelerator: the CPU supports it."""
    if _on_cuda():
        return bool(SM89OrLater)
    return not _on_rocm() or _has_arch_of(_rocm_archs_with_fp8())


def _rocm_archs_with_fp8() -> tuple[str, ...]:
    archs = ["gfx94"]
    if rocm_version() >= (6, 5):
        archs += ["gfx95", "gfx120"]
    if rocm_version() >= (7, 14):
        archs += _CDNA5
    return tuple(archs)


def _has_mslk() -> bool:
    return "USE_MSLK" in torch.__config__.show()


def evaluate_platform_supports_fp8_grouped_gemm() -> bool:
    if _on_rocm():
        return _has_mslk() and _has_arch_of(("gfx942", "gfx950"))
    return _on_cuda() and bool(SM90OrLater) and not SM100OrLater


def evaluate_platform_supports_mx_gemm() -> bool:
    if _on_rocm():
        archs = ["gfx950"]
        if rocm_version() >= (7, 14):
            archs += _CDNA5
        return rocm_version() >= (7, 0) and _has_arch_of(archs)
    if flag("TEST_CUDA"):
        return bool(SM100OrLater)
    return bool(flag("TEST_XPU"))


def evaluate_platform_supports_mxfp8_grouped_gemm() -> bool:
    return _has_mslk() and bool(IS_SM100)


PLATFORM_SUPPORTS_FLASH_ATTENTION_XPU = LazyVal(_xpu_has_flash_attention)
PLATFORM_SUPPORTS_FLASH_ATTENTION = LazyVal(evaluate_platform_supports_flash_attention)
PLATFORM_SUPPORTS_MEM_EFF_ATTENTION = LazyVal(evaluate_platform_supports_efficient_attention)
PLATFORM_SUPPORTS_CUDNN_ATTENTION = LazyVal(evaluate_platform_supports_cudnn_attention)
PLATFORM_SUPPORTS_FUSED_ATTENTION = LazyVal(
    lambda: any(
        (PLATFORM_SUPPORTS_FLASH_ATTENTION, PLATFORM_SUPPORTS_CUDNN_ATTENTION, PLATFORM_SUPPORTS_MEM_EFF_ATTENTION)
    )
)
PLATFORM_SUPPORTS_FUSED_SDPA = LazyVal(lambda: flag("TEST_CUDA") and not flag("TEST_WITH_ROCM"))
PLATFORM_SUPPORTS_BF16 = LazyVal(evaluate_platform_supports_bf16)
PLATFORM_SUPPORTS_BF16_ATOMICS = LazyVal(evaluate_platform_supports_bf16_atomics)
PLATFORM_SUPPORTS_HALF_ATOMICS = LazyVal(evaluate_platform_supports_half_atomics)
PLATFORM_SUPPORTS_FP8 = LazyVal(evaluate_platform_supports_fp8)
PLATFORM_SUPPORTS_FP8_GROUPED_GEMM = LazyVal(evaluate_platform_supports_fp8_grouped_gemm)
PLATFORM_SUPPORTS_MX_GEMM = LazyVal(evaluate_platform_supports_mx_gemm)
PLATFORM_SUPPORTS_MXFP8_GROUPED_GEMM = LazyVal(evaluate_platform_supports_mxfp8_grouped_gemm)
