"""The names of torch.testing._internal.common_utils that distributed tests use.

The flags (`IS_*`, `TEST_*`) are computed when they are first read: importing this module touches no accelerator.
"""

import typing as _typing

from torch_testing_ext._cases.device_type import (
    is_privateuse1_backend_available as is_privateuse1_backend_available,
    remove_device_and_dtype_suffixes as remove_device_and_dtype_suffixes,
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
from torch_testing_ext._marks.hardware import *
from torch_testing_ext._marks.parametrized import *
from torch_testing_ext._marks.parametrized import _TestParametrizer as _TestParametrizer
from torch_testing_ext._marks.settings_of_tests import timeout as timeout
from torch_testing_ext._marks.skips import *
from torch_testing_ext._utils.backend_settings import *
from torch_testing_ext._utils.contexts import *
from torch_testing_ext._utils.helpers import (
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
from torch_testing_ext._utils.retries import *
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
