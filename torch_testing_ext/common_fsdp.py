"""Bases, models and helpers for tests of FSDP, under the names of torch.testing._internal.common_fsdp.

Importing this module touches no accelerator: DEVICE_TYPE, DISTRIBUTED_BACKEND and DEVICE_COUNT are computed when they
are read, until a test file sets them.
"""

import typing as _typing

from torch_testing_ext._hypothesis import own_given as _own_given  # noqa: F401  # it is there from then on
from torch_testing_ext._machine import flags
from torch_testing_ext._machine.cuda import has_triton as has_triton
from torch_testing_ext._machine.random_state import set_rng_seed as set_rng_seed
from torch_testing_ext._machine.shared_names import share_names as _share
from torch_testing_ext._testing.bases.continuous import MultiProcContinuousTest as MultiProcContinuousTest
from torch_testing_ext._testing.bases.distributed_bases import run_subtests as run_subtests
from torch_testing_ext._testing.bases.multi_process import MultiProcessTestCase as MultiProcessTestCase
from torch_testing_ext._testing.bases.multi_threaded import MultiThreadedTestCase as MultiThreadedTestCase
from torch_testing_ext._testing.helpers.stores_and_folders import FILE_SCHEMA as FILE_SCHEMA
from torch_testing_ext._testing.marks.device_cycles import get_cycles_per_ms as get_cycles_per_ms
from torch_testing_ext._testing.marks.needs import TEST_SKIPS as TEST_SKIPS, TestSkip as TestSkip
from torch_testing_ext._testing.sharded import fsdp_devices as _fsdp_devices
from torch_testing_ext._testing.sharded.fsdp1_models import (
    AFTER as AFTER,
    BEFORE as BEFORE,
    HYBRID as HYBRID,
    AlwaysWrapNestedWrappedModule as AlwaysWrapNestedWrappedModule,
    DummyDDP as DummyDDP,
    DummyProcessGroup as DummyProcessGroup,
    FSDPInitMode as FSDPInitMode,
    FSDPTestModel as FSDPTestModel,
    MixtureOfExperts as MixtureOfExperts,
    ModuleWithDelay as ModuleWithDelay,
    NestedLinear as NestedLinear,
    NestedWrappedModule as NestedWrappedModule,
    NestedWrappedModuleWithDelay as NestedWrappedModuleWithDelay,
    NonUniformReqGradNWM as NonUniformReqGradNWM,
    SkipModel as SkipModel,
    SkipModule as SkipModule,
    TransformerWithSharedParams as TransformerWithSharedParams,
)
from torch_testing_ext._testing.sharded.fsdp2_models import (
    MLP as MLP,
    DoubleLinear as DoubleLinear,
    MLPStack as MLPStack,
)
from torch_testing_ext._testing.sharded.fsdp_bases import (
    FSDPTest as FSDPTest,
    FSDPTestContinuous as FSDPTestContinuous,
    FSDPTestMultiThread as FSDPTestMultiThread,
    get_devtype as get_devtype,
)
from torch_testing_ext._testing.sharded.fsdp_devices import DEVICEInitMode as DEVICEInitMode
from torch_testing_ext._testing.sharded.fsdp_patches import (
    AnyFunction as AnyFunction,
    compiled_fsdp_test as compiled_fsdp_test,
    patch_all_gather as patch_all_gather,
    patch_all_reduce as patch_all_reduce,
    patch_foreach_all_gather as patch_foreach_all_gather,
    patch_foreach_reduce as patch_foreach_reduce,
    patch_post_backward as patch_post_backward,
    patch_reduce_scatter as patch_reduce_scatter,
    patch_register_post_backward_hook_backward as patch_register_post_backward_hook_backward,
    patch_reshard as patch_reshard,
    patch_unshard as patch_unshard,
    reduce_scatter_with_assert as reduce_scatter_with_assert,
)
from torch_testing_ext._testing.sharded.fsdp_states import (
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
from torch_testing_ext._testing.sharded.fsdp_training import FSDPTestMixin as FSDPTestMixin

CUDAInitMode = DEVICEInitMode

if _typing.TYPE_CHECKING:
    DEVICE_COUNT: int
    DEVICE_TYPE: str
    DISTRIBUTED_BACKEND: str

_share(__name__, _fsdp_devices.constants, "DEVICE_COUNT", "DEVICE_TYPE", "DISTRIBUTED_BACKEND")
_FLAGS = {"TEST_CUDA", "TEST_HPU", "TEST_WITH_ROCM", "TEST_XPU"}


def __getattr__(name: str) -> _typing.Any:
    if name in _FLAGS:
        return flags.flag(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
