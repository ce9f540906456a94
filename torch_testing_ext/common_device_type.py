"""Tests for each type of device, under the names of torch.testing._internal.common_device_type.

Importing this module touches no accelerator: `device_type_test_bases` is computed when it is read.
"""

import typing as _typing

from torch_testing_ext._machine import flags
from torch_testing_ext._machine.flags import flag as flag
from torch_testing_ext._testing.bases import types_of_device as _types_of_device
from torch_testing_ext._testing.bases.device_type_base import DeviceTypeTestBase as DeviceTypeTestBase
from torch_testing_ext._testing.bases.device_type_tests import *
from torch_testing_ext._testing.bases.test_case import TestCase as TestCase
from torch_testing_ext._testing.bases.types_of_device import *
from torch_testing_ext._testing.marks.capabilities import (
    Capability as Capability,
    requires_capabilities as requires_capabilities,
)
from torch_testing_ext._testing.marks.device_types import (
    GIBIBYTE as GIBIBYTE,
    Decorator as Decorator,
    Target as Target,
    native_devices as _native_devices,
    native_devices as native_devices,
)
from torch_testing_ext._testing.marks.dtypes_of_tests import (
    dtypes as dtypes,
    dtypesIfCPU as dtypesIfCPU,
    dtypesIfCUDA as dtypesIfCUDA,
    dtypesIfHPU as dtypesIfHPU,
    dtypesIfMPS as dtypesIfMPS,
    dtypesIfPRIVATEUSE1 as dtypesIfPRIVATEUSE1,
    dtypesIfXPU as dtypesIfXPU,
    precisionOverride as precisionOverride,
    tol as tol,
    toleranceOverride as toleranceOverride,
)
from torch_testing_ext._testing.marks.failures_by_device_type import (
    expectedFailure as expectedFailure,
    expectedFailureCPU as expectedFailureCPU,
    expectedFailureCUDA as expectedFailureCUDA,
    expectedFailureHPU as expectedFailureHPU,
    expectedFailureIfRocm as expectedFailureIfRocm,
    expectedFailureMeta as expectedFailureMeta,
    expectedFailureMPS as expectedFailureMPS,
    expectedFailureXLA as expectedFailureXLA,
    expectedFailureXPU as expectedFailureXPU,
)
from torch_testing_ext._testing.marks.only_on_devices import (
    deviceCountAtLeast as deviceCountAtLeast,
    largeTensorTest as largeTensorTest,
    onlyAccelerator as onlyAccelerator,
    onlyCPU as onlyCPU,
    onlyCUDA as onlyCUDA,
    onlyCUDAAndPRIVATEUSE1 as onlyCUDAAndPRIVATEUSE1,
    onlyHPU as onlyHPU,
    onlyMPS as onlyMPS,
    onlyNativeDeviceTypes as onlyNativeDeviceTypes,
    onlyNativeDeviceTypesAnd as onlyNativeDeviceTypesAnd,
    onlyOn as onlyOn,
    onlyPRIVATEUSE1 as onlyPRIVATEUSE1,
    onlyXPU as onlyXPU,
)
from torch_testing_ext._testing.marks.parametrized import (
    compose_parametrize_fns as compose_parametrize_fns,
    dtype_name as dtype_name,
)
from torch_testing_ext._testing.marks.skips_at_run import skipIfTorchDynamo as skipIfTorchDynamo
from torch_testing_ext._testing.marks.skips_by_backend import (
    disablecuDNN as disablecuDNN,
    disableMkldnn as disableMkldnn,
    skipCPUIfNoLapack as skipCPUIfNoLapack,
    skipCPUIfNoMkl as skipCPUIfNoMkl,
    skipCPUIfNoMkldnn as skipCPUIfNoMkldnn,
    skipCUDAIfNoCudnn as skipCUDAIfNoCudnn,
    skipCUDAIfNoMagma as skipCUDAIfNoMagma,
)
from torch_testing_ext._testing.marks.skips_by_device_type import (
    skipCPUIf as skipCPUIf,
    skipCUDAIf as skipCUDAIf,
    skipCUDAIfNotRocm as skipCUDAIfNotRocm,
    skipCUDAIfRocm as skipCUDAIfRocm,
    skipGPUIf as skipGPUIf,
    skipHPU as skipHPU,
    skipHPUIf as skipHPUIf,
    skipIf as skipIf,
    skipLazy as skipLazy,
    skipLazyIf as skipLazyIf,
    skipMeta as skipMeta,
    skipMetaIf as skipMetaIf,
    skipMPS as skipMPS,
    skipMPSIf as skipMPSIf,
    skipPRIVATEUSE1 as skipPRIVATEUSE1,
    skipPRIVATEUSE1If as skipPRIVATEUSE1If,
    skipXLA as skipXLA,
    skipXLAIf as skipXLAIf,
    skipXPU as skipXPU,
    skipXPUIf as skipXPUIf,
)

if _typing.TYPE_CHECKING:
    device_type_test_bases: list[type[DeviceTypeTestBase]]


def __getattr__(name: str) -> _typing.Any:
    if name == "device_type_test_bases":
        return _types_of_device.get_device_type_test_bases()
    if name == "NATIVE_DEVICES":
        return _native_devices()
    try:
        return flags.flag(name)
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
