"""The base class, models and helpers of FSDP tests.

FSDP and tensor parallelism are imported here, and not where they are first used: ranks are forked from a process that
has imported the test module, and so find them there. No accelerator is touched; DEVICE_TYPE, DISTRIBUTED_BACKEND and
DEVICE_COUNT are found out when first asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from torch_testing_ext import _torch, common_utils
from torch_testing_ext._cases.continuous import UNSET
from torch_testing_ext._fsdp import fsdp_device
from torch_testing_ext._fsdp.fsdp_device import DEVICEInitMode
from torch_testing_ext._fsdp.fully_shard_models import MLP, DoubleLinear, MLPStack
from torch_testing_ext._fsdp.models import (
    AlwaysWrapNestedWrappedModule,
    DummyDDP,
    DummyProcessGroup,
    FSDPInitMode,
    FSDPTestModel,
    MixtureOfExperts,
    ModuleWithDelay,
    NestedLinear,
    NestedWrappedModule,
    NestedWrappedModuleWithDelay,
    NonUniformReqGradNWM,
    SkipModel,
    SkipModule,
    TransformerWithSharedParams,
)
from torch_testing_ext._fsdp.parity import FSDPTestMixin
from torch_testing_ext._fsdp.patches import (
    compiled_fsdp_test,
    patch_all_gather,
    patch_all_reduce,
    patch_foreach_all_gather,
    patch_foreach_reduce,
    patch_post_backward,
    patch_reduce_scatter,
    patch_register_post_backward_hook_backward,
    patch_reshard,
    patch_unshard,
    reduce_scatter_with_assert,
)
from torch_testing_ext._fsdp.state import (
    _assert_module_states,
    _broadcast_state_dict,
    _get_state_dict,
    _maybe_wrap_fsdp,
    _move_to_device,
    _zero_model,
    check_sharded_parity,
    get_full_params,
    subtest_name,
)
from torch_testing_ext._machine import accelerators
from torch_testing_ext._marks.needs import TEST_SKIPS, Skipped, TestSkip, first_unmet, needs_of, too_few_devices
from torch_testing_ext.common_distributed import (
    MultiProcContinuousTest,
    MultiProcessTestCase,
    MultiThreadedTestCase,
    run_subtests,
)
from torch_testing_ext.common_utils import FILE_SCHEMA, get_cycles_per_ms, set_rng_seed

CUDAInitMode = DEVICEInitMode

__all__ = [
    "MLP",
    "AlwaysWrapNestedWrappedModule",
    "CUDAInitMode",
    "DEVICEInitMode",
    "DoubleLinear",
    "DummyDDP",
    "DummyProcessGroup",
    "FSDPInitMode",
    "FSDPTest",
    "FSDPTestContinuous",
    "FSDPTestMixin",
    "FSDPTestModel",
    "FSDPTestMultiThread",
    "MLPStack",
    "MixtureOfExperts",
    "ModuleWithDelay",
    "NestedLinear",
    "NestedWrappedModule",
    "NestedWrappedModuleWithDelay",
    "NonUniformReqGradNWM",
    "SkipModel",
    "SkipModule",
    "TransformerWithSharedParams",
    "_assert_module_states",
    "_broadcast_state_dict",
    "_get_state_dict",
    "_maybe_wrap_fsdp",
    "_move_to_device",
    "_zero_model",
    "check_sharded_parity",
    "compiled_fsdp_test",
    "get_cycles_per_ms",
    "get_devtype",
    "get_full_params",
    "patch_all_gather",
    "patch_all_reduce",
    "patch_foreach_all_gather",
    "patch_foreach_reduce",
    "patch_post_backward",
    "patch_reduce_scatter",
    "patch_register_post_backward_hook_backward",
    "patch_reshard",
    "patch_unshard",
    "reduce_scatter_with_assert",
    "run_subtests",
    "subtest_name",
]

_ASKED_LATE: dict[str, Callable[[], Any]] = {
    "DEVICE_TYPE": fsdp_device.device_type,
    "DISTRIBUTED_BACKEND": fsdp_device.backend,
    "DEVICE_COUNT": fsdp_device.device_count,
    # Handed on from common_utils.
    "TEST_CUDA": lambda: common_utils.TEST_CUDA,
    "TEST_HPU": lambda: common_utils.TEST_HPU,
    "TEST_WITH_ROCM": lambda: common_utils.TEST_WITH_ROCM,
    "TEST_XPU": lambda: common_utils.TEST_XPU,
}


def __getattr__(name: str) -> Any:
    if name not in _ASKED_LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _ASKED_LATE[name]()


def get_devtype() -> torch.device:
    return torch.device(fsdp_device.device_type())


class FSDPTest(FSDPTestMixin, MultiProcessTestCase):
    """A test runs in `world_size` ranks that have a process group, a device and a seed.

    On a machine with accelerators there are as many ranks as those, one each. Without, a test skips, unless it allows
    the CPU: `@skip_if_lt_x_gpu(n, allow_cpu=True)` runs there under gloo, in n ranks, at least 2. A subclass may fix
    `world_size`.
    """

    def setUp(self) -> None:
        super().setUp()
        _keep_nccl_quiet()
        self._spawn_processes()

    @property
    def world_size(self) -> int:
        return max(2, self._devices_needed()) if self.device_type == "cpu" else accelerators.device_count()

    @property
    def device_type(self) -> str:
        """The accelerator, or "cpu" with fewer of them than the test asks for."""
        enough = accelerators.device_count() >= max(1, self._devices_needed())
        return (accelerators.accelerator_type() if enough else None) or "cpu"

    @property
    def process_group(self) -> dist.ProcessGroup:
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    @property
    def destroy_pg_upon_exit(self) -> bool:
        return False  # _run does it

    @property
    def init_method(self) -> str:
        return f"{FILE_SCHEMA}{self.file_name}"

    def _spawn_processes(self) -> None:
        skip = first_unmet(self._test_function()) or self._lacks_devices()
        if skip is not None:
            raise Skipped(skip)
        super()._spawn_processes()

    def _lacks_devices(self) -> TestSkip | None:
        if self.device_type != "cpu":
            ranks = int(self.world_size)
            return too_few_devices(ranks) if accelerators.device_count() < ranks else None
        return None if _may_use_cpu(self._test_function()) else TEST_SKIPS["no_accelerator"]

    def _devices_needed(self) -> int:
        return max((need.devices for need in needs_of(self._test_function())), default=0)

    def _test_function(self) -> Any:
        return getattr(self, self._testMethodName)

    @classmethod
    def _run(cls, rank: int, test_name: str, file_name: str, pipe: Any, **kwargs: Any) -> None:
        self = cls(test_name)
        self.rank = rank
        self.file_name = file_name
        fsdp_device.use(self.device_type)
        device = fsdp_device.compute_device(rank)
        if device.type != "cpu":
            torch.accelerator.set_device_index(device.index)
        self._init_process_group(bool(kwargs.get("fake_pg")))
        # No rank may skip and leave while others are still connecting to it, nor while they still need its answers.
        _meet(device)
        _torch.reset_dynamo()
        set_rng_seed()
        self.run_test(test_name, pipe)
        _torch.reset_dynamo()
        _meet(device)
        _torch.destroy_process_group()

    def _init_process_group(self, fake: bool) -> None:
        size = int(self.world_size)
        if fake:
            from torch_testing_ext.distributed.fake_pg import FakeStore

            dist.init_process_group(backend="fake", world_size=size, rank=self.rank, store=FakeStore())
            return
        backend = fsdp_device.backend()
        if not dist.is_backend_available(backend):
            raise Skipped(TEST_SKIPS["backend_unavailable"])
        dist.init_process_group(backend, init_method=self.init_method, world_size=size, rank=self.rank)


def _meet(device: torch.device) -> None:
    dist.barrier(device_ids=None if device.type == "cpu" else [device.index])


class FSDPTestContinuous(FSDPTestMixin, MultiProcContinuousTest):
    """Tests of a class in the same ranks, one for each accelerator unless `world_size` says otherwise.

    On a machine without, a test skips, unless it allows the CPU; there are two ranks then.
    """

    @classmethod
    def backend_str(cls) -> str:
        return fsdp_device.backend()

    @classmethod
    def device_type(cls) -> str:
        return fsdp_device.device_type()

    @classmethod
    def _get_world_size(cls, device_type: str) -> Any:
        alone = device_type == "cpu" and cls.world_size == UNSET
        return 2 if alone else super()._get_world_size(device_type)

    @classmethod
    def _init_pg(cls, rank: int, world_size: int, rdvz_file: str) -> None:
        _keep_nccl_quiet()
        device = fsdp_device.compute_device(rank)
        if device.type != "cpu":
            if fsdp_device.device_count() < world_size:
                raise Skipped(too_few_devices(world_size))
            torch.accelerator.set_device_index(device.index)
        super()._init_pg(rank, world_size, rdvz_file)

    @classmethod
    def _run_test_given_id(cls, test_id: str, **kwargs: Any) -> None:
        _torch.reset_dynamo()
        super()._run_test_given_id(test_id, **kwargs)
        _torch.reset_dynamo()

    def setUp(self) -> None:
        if fsdp_device.device_type() == "cpu" and not _may_use_cpu(getattr(self, self._testMethodName)):
            raise Skipped(TEST_SKIPS["no_accelerator"])
        super().setUp()

    @property
    def process_group(self) -> Any:
        return dist.group.WORLD


class FSDPTestMultiThread(MultiThreadedTestCase):
    """Tests that run in threads, one for each device."""

    @property
    def world_size(self) -> int:
        return fsdp_device.device_count()

    def setUp(self) -> None:
        super().setUp()
        self._spawn_threads()

    def run_subtests(self, *args: Any, **kwargs: Any) -> Any:
        return run_subtests(self, *args, **kwargs)

    def perThreadSetUp(self) -> None:
        _torch.reset_dynamo()

    def perThreadTearDown(self) -> None:
        _torch.reset_dynamo()


def _may_use_cpu(test: Any) -> bool:
    return any(need.allow_cpu for need in needs_of(test))


def _keep_nccl_quiet() -> None:
    # NCCL's clean-up thread, which this switches on, has made tests fail at random.
    os.environ["TORCH_NCCL_DESYNC_DEBUG"] = "0"
