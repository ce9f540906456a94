"""Conditions and settings for tests on CUDA, under the names of torch.testing._internal.common_cuda.

Importing this module touches no accelerator: a condition asks for the device when it is first used.
"""

import functools as _functools
import typing as _typing

from torch_testing_ext._machine import cuda as _cuda, flags
from torch_testing_ext._machine.cuda import *
from torch_testing_ext._machine.cuda_support import *
from torch_testing_ext._machine.cuda_versions import *
from torch_testing_ext._machine.cuda_versions import (  # noqa: F401
    cuda_version as _get_torch_cuda_version,
    magma_version as _get_magma_version,
    rocm_version as _get_torch_rocm_version,
)
from torch_testing_ext._machine.lazy_values import LazyVal as LazyVal
from torch_testing_ext._testing.helpers.backend_settings import (
    blas_library_context as blas_library_context,
    tf32_enabled as tf32_enabled,
    tf32_off as tf32_off,
    tf32_on as tf32_on,
    tf32_on_and_off as tf32_on_and_off,
    with_tf32_off as with_tf32_off,
)
from torch_testing_ext._testing.marks.device_cycles import initialize_cuda_context_rng as initialize_cuda_context_rng
from torch_testing_ext._testing.marks.failures_by_architecture import (
    TRITON_PTXAS_VERSION as TRITON_PTXAS_VERSION,
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

_FLAGS = (
    *("IS_MACOS", "IS_WINDOWS", "TEST_CUDA", "TEST_MTIA", "TEST_MULTIGPU", "TEST_NUMBA", "TEST_WITH_ROCM", "TEST_XPU"),
    *("TEST_CUSPARSE_GENERIC", "TEST_HIPSPARSE_GENERIC"),
)
_COMPUTED: dict[str, _typing.Callable[[], _typing.Any]] = {
    **{name: _functools.partial(flags.flag, name) for name in _FLAGS},
    "CUDA_DEVICE": _cuda.first_device,
    "TEST_NUMBA_CUDA": _cuda.numba_supports_cuda,
}


def __getattr__(name: str) -> _typing.Any:
    if name not in _COMPUTED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = _COMPUTED[name]()
    return value
