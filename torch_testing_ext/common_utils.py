"""The names of torch.testing._internal.common_utils that distributed tests use.

The flags (`IS_*`, `TEST_*`) are computed when they are first read: importing this module touches no accelerator.
"""

import typing as _typing

from torch_testing_ext._cases.device_type import (
    is_privateuse1_backend_available as is_privateuse1_backend_available,
    remove_device_and_dtype_suffixes as remove_device_and_dtype_suffixes,
)
from torch_testing_ext._cases.hardware_classes import (
    HardwareClassification as HardwareClassification,
    HardwareClassificationTestLoader as HardwareClassificationTestLoader,
    filter_by_hw_classification as filter_by_hw_classification,
    get_hw_classification as get_hw_classification,
)
from torch_testing_ext._cases.run_tests import run_tests as run_tests
from torch_testing_ext._cases.test_case import NoTest as NoTest, TestCase as TestCase, TestCaseBase as TestCaseBase
from torch_testing_ext._machine import flags as _flags
from torch_testing_ext._machine.lazy import LazyVal as LazyVal
from torch_testing_ext._machine.ports import (
    ADDRESS_IN_USE as ADDRESS_IN_USE,
    CONNECT_TIMEOUT as CONNECT_TIMEOUT,
    find_free_port as find_free_port,
    retry_on_connect_failures as retry_on_connect_failures,
)
from torch_testing_ext._machine.seeds import (
    SEED as SEED,
    freeze_rng_state as freeze_rng_state,
    set_rng_seed as set_rng_seed,
)
from torch_testing_ext._marks.device_types import native_devices as _native_devices
from torch_testing_ext._marks.hardware import (
    MI200_ARCH as MI200_ARCH,
    MI300_ARCH as MI300_ARCH,
    MI350_ARCH as MI350_ARCH,
    NAVI3_5_ARCH as NAVI3_5_ARCH,
    NAVI3_ARCH as NAVI3_ARCH,
    NAVI4_ARCH as NAVI4_ARCH,
    NAVI_ARCH as NAVI_ARCH,
    device_sleep as device_sleep,
    gcIfJetson as gcIfJetson,
    get_cycles_per_ms as get_cycles_per_ms,
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
    xfailIfNoAcceleratorTriton as xfailIfNoAcceleratorTriton,
)
from torch_testing_ext._marks.parametrized import (
    _TestParametrizer as _TestParametrizer,
    compose_parametrize_fns as compose_parametrize_fns,
    decorateIf as decorateIf,
    dtype_name as dtype_name,
    instantiate_parametrized_tests as instantiate_parametrized_tests,
    parametrize as parametrize,
    reparametrize as reparametrize,
    subtest as subtest,
    swap as swap,
)
from torch_testing_ext._marks.settings_of_tests import timeout as timeout
from torch_testing_ext._marks.skips import (
    lazy_skip_if as lazy_skip_if,
    markDynamoStrictTest as markDynamoStrictTest,
    periodic as periodic,
    requires_accelerator as requires_accelerator,
    requires_cuda as requires_cuda,
    requires_cuda_python_bindings as requires_cuda_python_bindings,
    requires_mkl as requires_mkl,
    requires_multigpu as requires_multigpu,
    requires_onednn as requires_onednn,
    requires_xpu as requires_xpu,
    runOnRocm as runOnRocm,
    serialTest as serialTest,
    skip_but_pass_in_sandcastle as skip_but_pass_in_sandcastle,
    skip_but_pass_in_sandcastle_if as skip_but_pass_in_sandcastle_if,
    skip_if_pytest as skip_if_pytest,
    skipIfCachingAllocatorDisabled as skipIfCachingAllocatorDisabled,
    skipIfCompiledWithoutNumpy as skipIfCompiledWithoutNumpy,
    skipIfCrossRef as skipIfCrossRef,
    skipIfFreeThreaded as skipIfFreeThreaded,
    skipIfHpu as skipIfHpu,
    skipIfHpu_BUGGY as skipIfHpu_BUGGY,
    skipIfMPS as skipIfMPS,
    skipIfNNModuleInlined as skipIfNNModuleInlined,
    skipIfNoDill as skipIfNoDill,
    skipIfNoLapack as skipIfNoLapack,
    skipIfNoSciPy as skipIfNoSciPy,
    skipIfNotRegistered as skipIfNotRegistered,
    skipIfNoXNNPACK as skipIfNoXNNPACK,
    skipIfNoXPU as skipIfNoXPU,
    skipIfPythonVersionMismatch as skipIfPythonVersionMismatch,
    skipIfRocm as skipIfRocm,
    skipIfRocm_BUGGY as skipIfRocm_BUGGY,
    skipIfSlowGradcheckEnv as skipIfSlowGradcheckEnv,
    skipIfTorchDynamo as skipIfTorchDynamo,
    skipIfTorchInductor as skipIfTorchInductor,
    skipIfWindows as skipIfWindows,
    skipIfXpu as skipIfXpu,
    skipIfXpu_BUGGY as skipIfXpu_BUGGY,
    skipRocmIfTorchInductor as skipRocmIfTorchInductor,
    slowTest as slowTest,
    slowTestIf as slowTestIf,
    suppress_warnings as suppress_warnings,
    unMarkDynamoStrictTest as unMarkDynamoStrictTest,
    xfail_inherited_tests as xfail_inherited_tests,
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
from torch_testing_ext._utils.backend_settings import (
    recover_orig_fp32_precision as recover_orig_fp32_precision,
    setBlasBackendsToDefaultFinally as setBlasBackendsToDefaultFinally,
    setLinalgBackendsToDefaultFinally as setLinalgBackendsToDefaultFinally,
    setSdpaBackendsToDefaultFinally as setSdpaBackendsToDefaultFinally,
    with_ieee_matmul_precision as with_ieee_matmul_precision,
)
from torch_testing_ext._utils.contexts import (
    DeterministicGuard as DeterministicGuard,
    TemporaryDirectoryName as TemporaryDirectoryName,
    TemporaryFileName as TemporaryFileName,
    check_leaked_tensors as check_leaked_tensors,
    disable_gc as disable_gc,
    set_cwd as set_cwd,
    set_default_dtype as set_default_dtype,
    set_default_tensor_type as set_default_tensor_type,
    set_warn_always_context as set_warn_always_context,
)
from torch_testing_ext._utils.helpers import (
    GRADCHECK_NONDET_TOL as GRADCHECK_NONDET_TOL,
    BytesIOContext as BytesIOContext,
    clone_input_helper as clone_input_helper,
    compare_equal_outs_and_grads as compare_equal_outs_and_grads,
    copy_func as copy_func,
    dtype2prec_DONTUSE as dtype2prec_DONTUSE,
    get_function_arglist as get_function_arglist,
    get_tensors_from as get_tensors_from,
    gradcheck as gradcheck,
    gradgradcheck as gradgradcheck,
    has_corresponding_torch_dtype as has_corresponding_torch_dtype,
    is_iterable as is_iterable,
    is_iterable_of_tensors as is_iterable_of_tensors,
    iter_indices as iter_indices,
    load_tests as load_tests,
    mock_wrapper as mock_wrapper,
    noncontiguous_like as noncontiguous_like,
    numpy_to_torch_dtype as numpy_to_torch_dtype,
    numpy_to_torch_dtypes as _numpy_to_torch_dtypes,
    outs_and_grads as outs_and_grads,
    patch_test_members as patch_test_members,
    raise_on_run_directly as raise_on_run_directly,
    to_gpu as to_gpu,
    torch_to_numpy_dtypes as _torch_to_numpy_dtypes,
)
from torch_testing_ext._utils.retries import (
    SwapTensorsGuard as SwapTensorsGuard,
    find_library_location as find_library_location,
    retry as retry,
    run_concurrently as run_concurrently,
    runWithoutCompiledAutograd as runWithoutCompiledAutograd,
    set_default_dtype_if_supported as set_default_dtype_if_supported,
    wrapDeterministicFlagAPITest as wrapDeterministicFlagAPITest,
    wrapSwapTensorsTest as wrapSwapTensorsTest,
)
from torch_testing_ext._utils.stores import FILE_SCHEMA as FILE_SCHEMA

_COMPUTED = {
    "NATIVE_DEVICES": _native_devices,
    "numpy_to_torch_dtype_dict": _numpy_to_torch_dtypes,
    "torch_to_numpy_dtype_dict": _torch_to_numpy_dtypes,
}


def __getattr__(name: str) -> _typing.Any:
    """Compute a flag, or another value that needs a device or a costly module."""
    try:
        value = _COMPUTED[name]() if name in _COMPUTED else _flags.flag(name)
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    globals()[name] = value
    return value
