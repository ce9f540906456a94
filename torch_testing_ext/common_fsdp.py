"""Bases, models and helpers for tests of FSDP, under the names of torch.testing._internal.common_fsdp.

Importing this module touches no accelerator: DEVICE_TYPE, DISTRIBUTED_BACKEND and DEVICE_COUNT are computed when they
are read, until a test file sets them.
"""

import typing as _typing

from torch_testing_ext._cases.continuous import MultiProcContinuousTest as MultiProcContinuousTest
from torch_testing_ext._cases.distributed_base import run_subtests as run_subtests
from torch_testing_ext._cases.multi_process import MultiProcessTestCase as MultiProcessTestCase
from torch_testing_ext._cases.multi_threaded import MultiThreadedTestCase as MultiThreadedTestCase
from torch_testing_ext._fsdp import fsdp_device as _fsdp_device
from torch_testing_ext._fsdp.fsdp_bases import (
    FSDPTest as FSDPTest,
    FSDPTestContinuous as FSDPTestContinuous,
    FSDPTestMultiThread as FSDPTestMultiThread,
    get_devtype as get_devtype,
)
from torch_testing_ext._fsdp.fsdp_device import DEVICEInitMode as DEVICEInitMode
from torch_testing_ext._fsdp.fully_shard_models import MLP as MLP, DoubleLinear as DoubleLinear, MLPStack as MLPStack
from torch_testing_ext._fsdp.model_state import (
    _assert_module_states as _assert_module_states,
    _broadcast_state_dict as _broadcast_state_dict,
    _get_state_dict as _get_state_dict,
    _maybe_wrap_fsdp as _maybe_wrap_fsdp,
    _move_to_device as _move_to_device,
    _zero_model as _zero_model,
    check_sharded_parity as check_sharded_parity,
    get_full_params as get_full_params,
    subtest_name as subtest_name,
)
from torch_testing_ext._fsdp.models import *
from torch_testing_ext._fsdp.parity import FSDPTestMixin as FSDPTestMixin
from torch_testing_ext._fsdp.patches import *
from torch_testing_ext._machine import flags as _flags
from torch_testing_ext._machine.lazy import share as _share
from torch_testing_ext._machine.seeds import set_rng_seed as set_rng_seed
from torch_testing_ext._marks.hardware import get_cycles_per_ms as get_cycles_per_ms
from torch_testing_ext._marks.needs import TEST_SKIPS as TEST_SKIPS, TestSkip as TestSkip
from torch_testing_ext._utils.stores import FILE_SCHEMA as FILE_SCHEMA

CUDAInitMode = DEVICEInitMode

if _typing.TYPE_CHECKING:
    DEVICE_COUNT: int
    DEVICE_TYPE: str
    DISTRIBUTED_BACKEND: str

_share(__name__, _fsdp_device.constants, "DEVICE_COUNT", "DEVICE_TYPE", "DISTRIBUTED_BACKEND")
_FLAGS = {"TEST_CUDA", "TEST_HPU", "TEST_WITH_ROCM", "TEST_XPU"}


def __getattr__(name: str) -> _typing.Any:
    if name in _FLAGS:
        return _flags.flag(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
