"""The names of torch.testing._internal.common_utils that distributed tests use.

The flags (`IS_*`, `TEST_*`) are computed when they are first read: importing this module touches no accelerator.
"""

import typing as _typing

from torch_testing_ext._machine import flags
from torch_testing_ext._machine.flags import flag as flag
from torch_testing_ext._machine.lazy_values import LazyVal as LazyVal
from torch_testing_ext._machine.ports import (
    ADDRESS_IN_USE as ADDRESS_IN_USE,
    CONNECT_TIMEOUT as CONNECT_TIMEOUT,
    find_free_port as find_free_port,
    retry_on_connect_failures as retry_on_connect_failures,
)
from torch_testing_ext._machine.random_state import (
    SEED as SEED,
    freeze_rng_state as freeze_rng_state,
    set_rng_seed as set_rng_seed,
)
from torch_testing_ext._testing.bases.run_tests import run_tests as run_tests
from torch_testing_ext._testing.bases.test_case import (
    NoTest as NoTest,
    TestCase as TestCase,
    TestCaseBase as TestCaseBase,
)
from torch_testing_ext._testing.bases.types_of_device import (
    is_privateuse1_backend_available as is_privateuse1_backend_available,
    remove_device_and_dtype_suffixes as remove_device_and_dtype_suffixes,
)
from torch_testing_ext._testing.helpers.backend_settings import (
    Function as Function,
    blas_library_context as blas_library_context,
    recover_orig_fp32_precision as recover_orig_fp32_precision,
    setBlasBackendsToDefaultFinally as setBlasBackendsToDefaultFinally,
    setLinalgBackendsToDefaultFinally as setLinalgBackendsToDefaultFinally,
    setSdpaBackendsToDefaultFinally as setSdpaBackendsToDefaultFinally,
    tf32_enabled as tf32_enabled,
    tf32_off as tf32_off,
    tf32_on as tf32_on,
    tf32_on_and_off as tf32_on_and_off,
    with_ieee_matmul_precision as with_ieee_matmul_precision,
    with_tf32_off as with_tf32_off,
)
from torch_testing_ext._testing.helpers.contexts import (
    DeterministicGuard as DeterministicGuard,
    F as F,
    TemporaryDirectoryName as TemporaryDirectoryName,
    TemporaryFileName as TemporaryFileName,
    captured_output as captured_output,
    changed_environment as changed_environment,
    check_leaked_tensors as check_leaked_tensors,
    disable_gc as disable_gc,
    set_cwd as set_cwd,
    set_default_dtype as set_default_dtype,
    set_default_tensor_type as set_default_tensor_type,
    set_warn_always_context as set_warn_always_context,
    within as within,
)
from torch_testing_ext._testing.helpers.function_runs import (
    SwapTensorsGuard as SwapTensorsGuard,
    find_library_location as find_library_location,
    retry as retry,
    run_concurrently as run_concurrently,
    runWithoutCompiledAutograd as runWithoutCompiledAutograd,
    set_default_dtype_if_supported as set_default_dtype_if_supported,
    wrapDeterministicFlagAPITest as wrapDeterministicFlagAPITest,
    wrapSwapTensorsTest as wrapSwapTensorsTest,
)
from torch_testing_ext._testing.helpers.small_helpers import (
    GRADCHECK_NONDET_TOL as GRADCHECK_NONDET_TOL,
    HardwareClassification as HardwareClassification,
    dtype2prec_DONTUSE as dtype2prec_DONTUSE,
    get_hw_classification as get_hw_classification,
    gradcheck as gradcheck,
    gradgradcheck as gradgradcheck,
    load_tests as load_tests,
    mock_wrapper as mock_wrapper,
    numpy_to_torch_dtypes as _numpy_to_torch_dtypes,
    raise_on_run_directly as raise_on_run_directly,
    torch_to_numpy_dtypes as _torch_to_numpy_dtypes,
)
from torch_testing_ext._testing.helpers.stores_and_folders import FILE_SCHEMA as FILE_SCHEMA
from torch_testing_ext._testing.marks.device_cycles import (
    CYCLES as CYCLES,
    device_sleep as device_sleep,
    gcIfJetson as gcIfJetson,
    get_cycles_per_ms as get_cycles_per_ms,
    initialize_cuda_context_rng as initialize_cuda_context_rng,
)
from torch_testing_ext._testing.marks.device_types import native_devices as _native_devices
from torch_testing_ext._testing.marks.failures_by_architecture import (
    TRITON_PTXAS_VERSION as TRITON_PTXAS_VERSION,
    requires_triton_ptxas_compat as requires_triton_ptxas_compat,
    xfailCUDAIfSM89OrLaterOnWindows as xfailCUDAIfSM89OrLaterOnWindows,
    xfailIfDistributedNotSupported as xfailIfDistributedNotSupported,
    xfailIfNoAcceleratorTriton as xfailIfNoAcceleratorTriton,
    xfailIfSM12X as xfailIfSM12X,
    xfailIfSM89 as xfailIfSM89,
    xfailIfSM89PreCUDA13 as xfailIfSM89PreCUDA13,
    xfailIfSM90 as xfailIfSM90,
    xfailIfSM100OrLater as xfailIfSM100OrLater,
    xfailIfSM120OrLater as xfailIfSM120OrLater,
)
from torch_testing_ext._testing.marks.parametrized import *
from torch_testing_ext._testing.marks.parametrized import _TestParametrizer as _TestParametrizer, copy_of as copy_of
from torch_testing_ext._testing.marks.settings_of_tests import timeout as timeout
from torch_testing_ext._testing.marks.skips import (
    Decorator as Decorator,
    bare_or_called as bare_or_called,
    lazy_skip_if as lazy_skip_if,
    skip_for as skip_for,
    skipIfHpu as skipIfHpu,
    skipIfMPS as skipIfMPS,
    skipIfNoXPU as skipIfNoXPU,
    skipIfRocm as skipIfRocm,
    skipIfWindows as skipIfWindows,
    skipIfXpu as skipIfXpu,
)
from torch_testing_ext._testing.marks.skips_at_definition import (
    periodic as periodic,
    requires_cuda as requires_cuda,
    requires_cuda_python_bindings as requires_cuda_python_bindings,
    requires_mkl as requires_mkl,
    requires_multigpu as requires_multigpu,
    requires_onednn as requires_onednn,
    requires_xpu as requires_xpu,
    skipIfCompiledWithoutNumpy as skipIfCompiledWithoutNumpy,
    skipIfNoDill as skipIfNoDill,
    skipIfNotRegistered as skipIfNotRegistered,
    skipIfSlowGradcheckEnv as skipIfSlowGradcheckEnv,
)
from torch_testing_ext._testing.marks.skips_at_run import (
    check_slow_or_fast as check_slow_or_fast,
    markDynamoStrictTest as markDynamoStrictTest,
    requires_accelerator as requires_accelerator,
    runOnRocm as runOnRocm,
    serialTest as serialTest,
    skip_but_pass_in_sandcastle as skip_but_pass_in_sandcastle,
    skip_but_pass_in_sandcastle_if as skip_but_pass_in_sandcastle_if,
    skip_if_pytest as skip_if_pytest,
    skipIfCachingAllocatorDisabled as skipIfCachingAllocatorDisabled,
    skipIfCrossRef as skipIfCrossRef,
    skipIfFreeThreaded as skipIfFreeThreaded,
    skipIfHpu_BUGGY as skipIfHpu_BUGGY,
    skipIfNNModuleInlined as skipIfNNModuleInlined,
    skipIfNoLapack as skipIfNoLapack,
    skipIfNoSciPy as skipIfNoSciPy,
    skipIfNoXNNPACK as skipIfNoXNNPACK,
    skipIfPythonVersionMismatch as skipIfPythonVersionMismatch,
    skipIfRocm_BUGGY as skipIfRocm_BUGGY,
    skipIfTorchDynamo as skipIfTorchDynamo,
    skipIfTorchInductor as skipIfTorchInductor,
    skipIfXpu_BUGGY as skipIfXpu_BUGGY,
    skipRocmIfTorchInductor as skipRocmIfTorchInductor,
    slowTest as slowTest,
    slowTestIf as slowTestIf,
    suppress_warnings as suppress_warnings,
    unMarkDynamoStrictTest as unMarkDynamoStrictTest,
    xfail_inherited_tests as xfail_inherited_tests,
    xfail_where as xfail_where,
    xfailIf as xfailIf,
    xfailIfACL as xfailIfACL,
    xfailIfLinux as xfailIfLinux,
    xfailIfPy312Plus as xfailIfPy312Plus,
    xfailIfPy313AndEarlier as xfailIfPy313AndEarlier,
    xfailIfPy314Plus as xfailIfPy314Plus,
    xfailIfROCm as xfailIfROCm,
    xfailIfS390X as xfailIfS390X,
    xfailIfTorchDynamo as xfailIfTorchDynamo,
    xfailIfWindows as xfailIfWindows,
)
from torch_testing_ext._testing.marks.skips_by_architecture import (
    MI200_ARCH as MI200_ARCH,
    MI300_ARCH as MI300_ARCH,
    MI350_ARCH as MI350_ARCH,
    NAVI3_5_ARCH as NAVI3_5_ARCH,
    NAVI3_ARCH as NAVI3_ARCH,
    NAVI4_ARCH as NAVI4_ARCH,
    NAVI_ARCH as NAVI_ARCH,
    getRocmArchName as getRocmArchName,
    getRocmVersion as getRocmVersion,
    is_navi3_arch as is_navi3_arch,
    isRocmArchAnyOf as isRocmArchAnyOf,
    requires_cuda_p2p_access as requires_cuda_p2p_access,
    runOnRocmArch as runOnRocmArch,
    skipIfRocmArch as skipIfRocmArch,
    skipIfRocmVersionAtLeast as skipIfRocmVersionAtLeast,
    skipIfRocmVersionInRange as skipIfRocmVersionInRange,
    skipIfRocmVersionLessThan as skipIfRocmVersionLessThan,
    skipIfWindowsXPU as skipIfWindowsXPU,
)

_COMPUTED = {
    "NATIVE_DEVICES": _native_devices,
    "numpy_to_torch_dtype_dict": _numpy_to_torch_dtypes,
    "torch_to_numpy_dtype_dict": _torch_to_numpy_dtypes,
}


def __getattr__(name: str) -> _typing.Any:
    """Compute a flag, or another value that needs a device or a costly module."""
    try:
        value = _COMPUTED[name]() if name in _COMPUTED else flags.flag(name)
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    globals()[name] = value
    return value
