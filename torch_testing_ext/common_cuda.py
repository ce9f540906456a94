"""Conditions and settings for tests on CUDA, under the names of torch.testing._internal.common_cuda.

Importing this module touches no accelerator: a condition asks for the device when it is first used.
"""

import functools as _functools
import typing as _typing

from torch_testing_ext._machine import cuda as _cuda, flags as _flags
from torch_testing_ext._machine.cuda import (
    BF16X9_API_SUPPORTED as BF16X9_API_SUPPORTED,
    BF16X9_SUPPORTED as BF16X9_SUPPORTED,
    CUDA_ALREADY_INITIALIZED_ON_IMPORT as CUDA_ALREADY_INITIALIZED_ON_IMPORT,
    DEVICE_ASSERT_MARKERS as DEVICE_ASSERT_MARKERS,
    IS_JETSON as IS_JETSON,
    IS_SM10X as IS_SM10X,
    IS_SM12X as IS_SM12X,
    IS_SM89 as IS_SM89,
    IS_SM90 as IS_SM90,
    IS_SM100 as IS_SM100,
    IS_THOR as IS_THOR,
    PLATFORM_FUSED_ATTENTION_SUPPORTS_HDIM512 as PLATFORM_FUSED_ATTENTION_SUPPORTS_HDIM512,
    PLATFORM_SUPPORTS_BF16 as PLATFORM_SUPPORTS_BF16,
    PLATFORM_SUPPORTS_BF16_ATOMICS as PLATFORM_SUPPORTS_BF16_ATOMICS,
    PLATFORM_SUPPORTS_CK_SDPA as PLATFORM_SUPPORTS_CK_SDPA,
    PLATFORM_SUPPORTS_CUDNN_ATTENTION as PLATFORM_SUPPORTS_CUDNN_ATTENTION,
    PLATFORM_SUPPORTS_FLASH_ATTENTION as PLATFORM_SUPPORTS_FLASH_ATTENTION,
    PLATFORM_SUPPORTS_FLASH_ATTENTION_XPU as PLATFORM_SUPPORTS_FLASH_ATTENTION_XPU,
    PLATFORM_SUPPORTS_FP8 as PLATFORM_SUPPORTS_FP8,
    PLATFORM_SUPPORTS_FP8_GROUPED_GEMM as PLATFORM_SUPPORTS_FP8_GROUPED_GEMM,
    PLATFORM_SUPPORTS_FP8_SPARSE as PLATFORM_SUPPORTS_FP8_SPARSE,
    PLATFORM_SUPPORTS_FUSED_ATTENTION as PLATFORM_SUPPORTS_FUSED_ATTENTION,
    PLATFORM_SUPPORTS_FUSED_SDPA as PLATFORM_SUPPORTS_FUSED_SDPA,
    PLATFORM_SUPPORTS_GREEN_CONTEXT as PLATFORM_SUPPORTS_GREEN_CONTEXT,
    PLATFORM_SUPPORTS_HALF_ATOMICS as PLATFORM_SUPPORTS_HALF_ATOMICS,
    PLATFORM_SUPPORTS_MEM_EFF_ATTENTION as PLATFORM_SUPPORTS_MEM_EFF_ATTENTION,
    PLATFORM_SUPPORTS_MX_GEMM as PLATFORM_SUPPORTS_MX_GEMM,
    PLATFORM_SUPPORTS_MXFP8_GROUPED_GEMM as PLATFORM_SUPPORTS_MXFP8_GROUPED_GEMM,
    PLATFORM_SUPPORTS_WORKQUEUE_CONFIG as PLATFORM_SUPPORTS_WORKQUEUE_CONFIG,
    ROCM_VERSION as ROCM_VERSION,
    TEST_CUDA_GRAPH_TOOLS_ID as TEST_CUDA_GRAPH_TOOLS_ID,
    TEST_CUDNN as TEST_CUDNN,
    TEST_CUDNN_VERSION as TEST_CUDNN_VERSION,
    TEST_CUPTI_V13_3 as TEST_CUPTI_V13_3,
    CDNA2OrLater as CDNA2OrLater,
    CDNA3OrLater as CDNA3OrLater,
    CDNA5OrLater as CDNA5OrLater,
    SM53OrLater as SM53OrLater,
    SM60OrLater as SM60OrLater,
    SM70OrLater as SM70OrLater,
    SM75OrLater as SM75OrLater,
    SM80OrLater as SM80OrLater,
    SM89OrLater as SM89OrLater,
    SM90OrLater as SM90OrLater,
    SM100OrLater as SM100OrLater,
    SM120OrLater as SM120OrLater,
    cuda_version as _get_torch_cuda_version,  # noqa: F401
    evaluate_gfx_arch_within as evaluate_gfx_arch_within,
    evaluate_platform_sdpa_supports_hdim512 as evaluate_platform_sdpa_supports_hdim512,
    evaluate_platform_supports_bf16 as evaluate_platform_supports_bf16,
    evaluate_platform_supports_bf16_atomics as evaluate_platform_supports_bf16_atomics,
    evaluate_platform_supports_ck_sdpa as evaluate_platform_supports_ck_sdpa,
    evaluate_platform_supports_cudnn_attention as evaluate_platform_supports_cudnn_attention,
    evaluate_platform_supports_efficient_attention as evaluate_platform_supports_efficient_attention,
    evaluate_platform_supports_flash_attention as evaluate_platform_supports_flash_attention,
    evaluate_platform_supports_fp8 as evaluate_platform_supports_fp8,
    evaluate_platform_supports_fp8_grouped_gemm as evaluate_platform_supports_fp8_grouped_gemm,
    evaluate_platform_supports_fp8_sparse as evaluate_platform_supports_fp8_sparse,
    evaluate_platform_supports_green_context as evaluate_platform_supports_green_context,
    evaluate_platform_supports_half_atomics as evaluate_platform_supports_half_atomics,
    evaluate_platform_supports_hipsparselt as evaluate_platform_supports_hipsparselt,
    evaluate_platform_supports_mx_gemm as evaluate_platform_supports_mx_gemm,
    evaluate_platform_supports_mxfp8_grouped_gemm as evaluate_platform_supports_mxfp8_grouped_gemm,
    evaluate_platform_supports_workqueue_config as evaluate_platform_supports_workqueue_config,
    gfx_arch_supports_opportunistic_fastatomics as gfx_arch_supports_opportunistic_fastatomics,
    has_device_side_assert as has_device_side_assert,
    hipblaslt_version as _get_torch_hipblaslt_version,  # noqa: F401
    hipsparselt_supported_archs as hipsparselt_supported_archs,
    magma_version as _get_magma_version,  # noqa: F401
    rocm_mx_swizzle as rocm_mx_swizzle,
    rocm_version as _get_torch_rocm_version,  # noqa: F401
)
from torch_testing_ext._machine.lazy import LazyVal as LazyVal
from torch_testing_ext._marks.hardware import (
    TRITON_PTXAS_VERSION as TRITON_PTXAS_VERSION,
    initialize_cuda_context_rng as initialize_cuda_context_rng,
    requires_triton_ptxas_compat as requires_triton_ptxas_compat,
    xfailCUDAIfSM89OrLaterOnWindows as xfailCUDAIfSM89OrLaterOnWindows,
    xfailIfDistributedNotSupported as xfailIfDistributedNotSupported,
    xfailIfSM12X as xfailIfSM12X,
    xfailIfSM89 as xfailIfSM89,
    xfailIfSM89PreCUDA13 as xfailIfSM89PreCUDA13,
    xfailIfSM90 as xfailIfSM90,
    xfailIfSM100OrLater as xfailIfSM100OrLater,
    xfailIfSM120OrLater as xfailIfSM120OrLater,
)
from torch_testing_ext._utils.backend_settings import (
    blas_library_context as blas_library_context,
    tf32_enabled as tf32_enabled,
    tf32_off as tf32_off,
    tf32_on as tf32_on,
    tf32_on_and_off as tf32_on_and_off,
    with_tf32_off as with_tf32_off,
)

_FLAGS = (
    *("IS_MACOS", "IS_WINDOWS", "TEST_CUDA", "TEST_MTIA", "TEST_MULTIGPU", "TEST_NUMBA", "TEST_WITH_ROCM", "TEST_XPU"),
    *("TEST_CUSPARSE_GENERIC", "TEST_HIPSPARSE_GENERIC"),
)
_COMPUTED: dict[str, _typing.Callable[[], _typing.Any]] = {
    **{name: _functools.partial(_flags.flag, name) for name in _FLAGS},
    "CUDA_DEVICE": _cuda.first_device,
    "TEST_CUPTI": _cuda.has_cupti,
    "TEST_NUMBA_CUDA": _cuda.numba_supports_cuda,
}


def __getattr__(name: str) -> _typing.Any:
    if name not in _COMPUTED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = _COMPUTED[name]()
    return value
