"""Abilities of CUDA's and ROCm's libraries and drivers beyond the first device's architecture, for tests' conditions.

As in `cuda.py`, a condition asks when it is first used, and another process answers.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_testing_ext import _torch

from . import accelerators
from .cuda import capability, cuda_version, evaluate_gfx_arch_within, rocm_version
from .flags import flag
from .lazy import LazyVal


def _supports(name: str) -> bool:
    return bool(accelerators.cuda_libraries().get(name))


def evaluate_platform_supports_ck_sdpa() -> bool:
    return bool(flag("TEST_WITH_ROCM")) and _supports("ck_sdpa")


def evaluate_platform_supports_green_context() -> bool:
    return _supports("green_contexts")


def evaluate_platform_supports_workqueue_config() -> bool:
    return _supports("workqueues")


def hipblaslt_version() -> tuple[int, int, int] | None:
    """Return the version of hipBLASLt; None without it."""
    number = accelerators.cuda_libraries().get("hipblaslt") if flag("TEST_WITH_ROCM") else None
    return (number // 10000, number // 100 % 100, number % 100) if number else None


def gfx_arch_supports_opportunistic_fastatomics() -> bool:
    return evaluate_gfx_arch_within(["gfx942", "gfx950"])


def rocm_mx_swizzle(mat_dtype: Any) -> bool:
    """Does this device take the scales of MX blocks for this dtype in the swizzled layout?"""
    if torch.version.hip is None or not evaluate_gfx_arch_within(["gfx950"]):
        return False
    return rocm_version() >= ((7, 13) if mat_dtype == torch.float4_e2m1fn_x2 else (7, 14))


def has_cupti() -> bool:
    """Is CUPTI usable from Python?"""
    return not flag("TEST_WITH_ROCM") and _torch.cuda_state.has_cupti()


PLATFORM_SUPPORTS_CK_SDPA = LazyVal(evaluate_platform_supports_ck_sdpa)
PLATFORM_SUPPORTS_GREEN_CONTEXT = LazyVal(evaluate_platform_supports_green_context)
PLATFORM_SUPPORTS_WORKQUEUE_CONFIG = LazyVal(evaluate_platform_supports_workqueue_config)
TEST_CUPTI_V13_3 = LazyVal(lambda: has_cupti() and _torch.cuda_state.cupti_version() >= 130300)
TEST_CUDA_GRAPH_TOOLS_ID = LazyVal(lambda: _supports("graph_tools_id"))
BF16X9_API_SUPPORTED = LazyVal(lambda: flag("TEST_CUDA") and not flag("TEST_WITH_ROCM") and cuda_version() >= (12, 9))
BF16X9_SUPPORTED = LazyVal(lambda: bool(BF16X9_API_SUPPORTED) and capability() in ((10, 0), (10, 3)))
