"""The names of torch.testing._internal.common_utils that distributed tests use.

The flags (`IS_*`, `TEST_*`) are computed when they are first read: importing this module touches no accelerator.
"""

import typing as _typing

from torch_testing_ext._cases.run_tests import run_tests as run_tests
from torch_testing_ext._cases.test_case import NoTest as NoTest, TestCase as TestCase
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
from torch_testing_ext._marks.hardware import (
    MI200_ARCH as MI200_ARCH,
    MI300_ARCH as MI300_ARCH,
    MI350_ARCH as MI350_ARCH,
    NAVI3_ARCH as NAVI3_ARCH,
    NAVI4_ARCH as NAVI4_ARCH,
    NAVI_ARCH as NAVI_ARCH,
    device_sleep as device_sleep,
    gcIfJetson as gcIfJetson,
    get_cycles_per_ms as get_cycles_per_ms,
    getRocmArchName as getRocmArchName,
    getRocmVersion as getRocmVersion,
    isRocmArchAnyOf as isRocmArchAnyOf,
    requires_cuda_p2p_access as requires_cuda_p2p_access,
    runOnRocmArch as runOnRocmArch,
    skipIfRocmArch as skipIfRocmArch,
    skipIfRocmVersionLessThan as skipIfRocmVersionLessThan,
    skipIfWindowsXPU as skipIfWindowsXPU,
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
)
from torch_testing_ext._marks.skips import (
    lazy_skip_if as lazy_skip_if,
    markDynamoStrictTest as markDynamoStrictTest,
    requires_cuda as requires_cuda,
    requires_mkl as requires_mkl,
    runOnRocm as runOnRocm,
    serialTest as serialTest,
    skip_but_pass_in_sandcastle as skip_but_pass_in_sandcastle,
    skip_but_pass_in_sandcastle_if as skip_but_pass_in_sandcastle_if,
    skip_if_pytest as skip_if_pytest,
    skipIfCrossRef as skipIfCrossRef,
    skipIfFreeThreaded as skipIfFreeThreaded,
    skipIfHpu as skipIfHpu,
    skipIfMPS as skipIfMPS,
    skipIfNoDill as skipIfNoDill,
    skipIfNoSciPy as skipIfNoSciPy,
    skipIfNoXPU as skipIfNoXPU,
    skipIfPythonVersionMismatch as skipIfPythonVersionMismatch,
    skipIfRocm as skipIfRocm,
    skipIfTorchDynamo as skipIfTorchDynamo,
    skipIfTorchInductor as skipIfTorchInductor,
    skipIfWindows as skipIfWindows,
    skipIfXpu as skipIfXpu,
    slowTest as slowTest,
    slowTestIf as slowTestIf,
    suppress_warnings as suppress_warnings,
    unMarkDynamoStrictTest as unMarkDynamoStrictTest,
    xfail_inherited_tests as xfail_inherited_tests,
    xfailIf as xfailIf,
    xfailIfLinux as xfailIfLinux,
    xfailIfPy312Plus as xfailIfPy312Plus,
    xfailIfROCm as xfailIfROCm,
    xfailIfTorchDynamo as xfailIfTorchDynamo,
    xfailIfWindows as xfailIfWindows,
)
from torch_testing_ext._marks.timeouts import timeout as timeout
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
    BytesIOContext as BytesIOContext,
    clone_input_helper as clone_input_helper,
    copy_func as copy_func,
    gradcheck as gradcheck,
    gradgradcheck as gradgradcheck,
    load_tests as load_tests,
    mock_wrapper as mock_wrapper,
    noncontiguous_like as noncontiguous_like,
    patch_test_members as patch_test_members,
    raise_on_run_directly as raise_on_run_directly,
    to_gpu as to_gpu,
)
from torch_testing_ext._utils.stores import FILE_SCHEMA as FILE_SCHEMA


def __getattr__(name: str) -> _typing.Any:
    """Compute a flag."""
    try:
        value = _flags.flag(name)
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    globals()[name] = value
    return value
