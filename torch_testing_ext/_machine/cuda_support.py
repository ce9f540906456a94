"""The support of the platform for attention, dtypes and matrix products."""

import os

import torch

from torch_testing_ext._machine import accelerators
from torch_testing_ext._machine.flags import flag
from torch_testing_ext._machine.lazy_values import LazyVal

from .cuda import (
    CDNA5,
    IS_SM100,
    TEST_CUDNN_VERSION,
    SM80OrLater,
    SM89OrLater,
    SM90OrLater,
    SM100OrLater,
    evaluate_gfx_arch_within,
    has_arch_of,
    on_cuda,
    on_rocm,
)
from .cuda_versions import rocm_version

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
    if on_cuda():
        return bool(SM89OrLater)
    return not on_rocm() or has_arch_of(_rocm_archs_with_fp8())


def _rocm_archs_with_fp8() -> tuple[str, ...]:
    archs = ["gfx94"]
    if rocm_version() >= (6, 5):
        archs += ["gfx95", "gfx120"]
    if rocm_version() >= (7, 14):
        archs += CDNA5
    return tuple(archs)


def _has_mslk() -> bool:
    return "USE_MSLK" in torch.__config__.show()


def evaluate_platform_supports_fp8_grouped_gemm() -> bool:
    if on_rocm():
        return _has_mslk() and has_arch_of(("gfx942", "gfx950"))
    return on_cuda() and bool(SM90OrLater) and not SM100OrLater


def evaluate_platform_supports_mx_gemm() -> bool:
    if on_rocm():
        archs = ["gfx950"]
        if rocm_version() >= (7, 14):
            archs += CDNA5
        return rocm_version() >= (7, 0) and has_arch_of(archs)
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
