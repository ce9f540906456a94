"""Tests for each type of device, under the names of torch.testing._internal.common_device_type.

Importing this module touches no accelerator: `device_type_test_bases` is computed when it is read.
"""

import typing as _typing

from torch_testing_ext._cases import device_type as _device_type
from torch_testing_ext._cases.device_type import *
from torch_testing_ext._cases.test_case import TestCase as TestCase
from torch_testing_ext._machine import flags as _flags
from torch_testing_ext._marks.capabilities import (
    Capability as Capability,
    requires_capabilities as requires_capabilities,
)
from torch_testing_ext._marks.device_dtypes import *
from torch_testing_ext._marks.device_types import *
from torch_testing_ext._marks.device_types import native_devices as _native_devices
from torch_testing_ext._marks.parametrized import (
    compose_parametrize_fns as compose_parametrize_fns,
    dtype_name as dtype_name,
)
from torch_testing_ext._marks.skips import skipIfTorchDynamo as skipIfTorchDynamo

if _typing.TYPE_CHECKING:
    device_type_test_bases: list[type[_device_type.DeviceTypeTestBase]]


def __getattr__(name: str) -> _typing.Any:
    if name == "device_type_test_bases":
        return _device_type.get_device_type_test_bases()
    if name == "NATIVE_DEVICES":
        return _native_devices()
    try:
        return _flags.flag(name)
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
