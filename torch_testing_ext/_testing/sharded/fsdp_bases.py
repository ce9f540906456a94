"""The bases of FSDP tests: with fresh ranks, persistent ranks or threads.

This module imports FSDP and tensor parallelism instead of leaving that to their first use: ranks are forked after the
test module is imported and inherit what it imported. No accelerator is touched.
"""

import os
from typing import Any

import torch
import torch.distributed as dist

from torch_testing_ext._machine import accelerators
from torch_testing_ext._testing.bases.continuous import UNSET, MultiProcContinuousTest
from torch_testing_ext._testing.bases.distributed_bases import run_subtests
from torch_testing_ext._testing.bases.multi_process import MultiProcessTestCase
from torch_testing_ext._testing.bases.multi_threaded import MultiThreadedTestCase
from torch_testing_ext._testing.bases.ranked_test_case import checked_world_size
from torch_testing_ext._testing.helpers.stores_and_folders import FILE_SCHEMA
from torch_testing_ext._testing.marks.needs import TEST_SKIPS, Skipped, TestSkip, most_needed, needs_of, too_few_devices
from torch_testing_ext._torch import compiler_state

from . import fsdp_devices
from .fsdp_training import FSDPTestMixin


def get_devtype() -> torch.device:
    return torch.device(fsdp_devices.device_type())


class FSDPTest(FSDPTestMixin, MultiProcessTestCase):
    """A MultiProcessTestCase for FSDP: every rank has a process group, a device and a seed.

    There is one rank for each accelerator. On a machine without accelerators, a test skips unless it allows the CPU:
    `@skip_if_lt_x_gpu(n, allow_cpu=True)` runs there under gloo, in n ranks, at least 2. A subclass may override
    `device_type`, also to use the CPU beside accelerators, `world_size`, and with `_run` everything that happens in a
    rank.
    """

    def setUp(self) -> None:
        super().setUp()
        _keep_nccl_quiet()
        self._spawn_processes()

    @property
    def world_size(self) -> int:
        if fsdp_devices.constants.is_set("DEVICE_COUNT"):
            return fsdp_devices.device_count()
        return (
            max(2, _devices_needed(self)) if _runs_on_cpu(self) else accelerators.ranks_for(_devices_needed(self)) or 1
        )

    @property
    def device_type(self) -> str:
        """The type of the accelerators, or "cpu" if there are fewer than the test needs."""
        if fsdp_devices.constants.is_set("DEVICE_TYPE") or fsdp_devices.in_whole_world():
            return fsdp_devices.device_type()
        enough = accelerators.most_ranks() >= max(1, _devices_needed(self))
        return (accelerators.accelerator_type() if enough else None) or "cpu"

    @property
    def process_group(self) -> dist.ProcessGroup:
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    @property
    def destroy_pg_upon_exit(self) -> bool:
        # _run does it.
        return False

    @property
    def init_method(self) -> str:
        return f"{FILE_SCHEMA}{self.file_name}"

    def _known_skip(self) -> TestSkip | None:
        if self._decides_about_skips():
            return None
        return super()._known_skip() or _missing_devices(self, accelerators.most_ranks())

    def _skip_in_rank(self) -> TestSkip | None:
        fsdp_devices.use_device_type(self.device_type)
        return _missing_devices(self, fsdp_devices.most_ranks_here())


def _test_function(test: FSDPTest) -> Any:
    return getattr(test, test._testMethodName)


def _devices_needed(test: FSDPTest) -> int:
    return most_needed([_test_function(test)])


def _runs_on_cpu(test: FSDPTest) -> bool:
    chosen = type(test).device_type is not FSDPTest.device_type
    return test.device_type == "cpu" and (chosen or _may_use_cpu(_test_function(test)))


def _missing_devices(test: FSDPTest, count: int) -> TestSkip | None:
    """The skip, if `count` accelerators are too few for the ranks and the test may not use the CPU."""
    if _runs_on_cpu(test):
        return None
    ranks = int(test.world_size)
    if count < ranks:
        return too_few_devices(ranks) if count else TEST_SKIPS["no_accelerator"]
    return None


class FSDPTestContinuous(FSDPTestMixin, MultiProcContinuousTest):
    """A MultiProcContinuousTest for FSDP, by default with one rank for each accelerator.

    On a machine without accelerators, a test skips unless it allows the CPU, and there are two ranks.
    """

    @classmethod
    def backend_str(cls) -> str:
        size = checked_world_size(cls._get_world_size(fsdp_devices.device_type()), f"{cls.__qualname__}.world_size")
        return fsdp_devices.backend_for(size)

    @classmethod
    def device_type(cls) -> str:
        return fsdp_devices.device_type()

    @classmethod
    def _get_world_size(cls, device_type: str) -> Any:
        # This holds for a property, too.
        if cls.world_size != UNSET:
            return super()._get_world_size(device_type)
        if device_type == "cpu":
            return 2 if cls._allows_cpu() else fsdp_devices.device_count()
        if fsdp_devices.constants.is_set("DEVICE_COUNT"):
            return fsdp_devices.device_count()
        return accelerators.ranks_for(cls._devices_needed())

    @classmethod
    def _init_pg(cls, rank: int, world_size: int, rdvz_file: str) -> None:
        _keep_nccl_quiet()
        device = fsdp_devices.compute_device(rank)
        if fsdp_devices.most_ranks_here() < world_size and not (device.type == "cpu" and cls._allows_cpu()):
            raise Skipped(too_few_devices(world_size))
        if device.type != "cpu":
            torch.accelerator.set_device_index(device.index)
        super()._init_pg(rank, world_size, rdvz_file)

    @classmethod
    def _allows_cpu(cls) -> bool:
        """Whether a test of it does. The others skip in the parent, unless the class overrides what decides that."""
        return any(_may_use_cpu(getattr(cls, name, None)) for name in dir(cls))

    @classmethod
    def _run_test_given_id(cls, test_id: str, **kwargs: Any) -> None:
        compiler_state.reset_dynamo()
        super()._run_test_given_id(test_id, **kwargs)
        compiler_state.reset_dynamo()

    def _known_skip(self) -> TestSkip | None:
        if self._decides_about_skips():
            return None
        on_cpu = fsdp_devices.device_type() == "cpu"
        if on_cpu and not _may_use_cpu(getattr(self, self._testMethodName)):
            return TEST_SKIPS["no_accelerator"]
        return super()._known_skip()

    @property
    def process_group(self) -> Any:
        return dist.group.WORLD


class FSDPTestMultiThread(MultiThreadedTestCase):
    """A MultiThreadedTestCase for FSDP, with one thread for each device."""

    @property
    def world_size(self) -> int:
        return fsdp_devices.device_count()

    def setUp(self) -> None:
        super().setUp()
        self._spawn_threads()

    def run_subtests(self, *args: Any, **kwargs: Any) -> Any:
        return run_subtests(self, *args, **kwargs)

    def perThreadSetUp(self) -> None:
        compiler_state.reset_dynamo()

    def perThreadTearDown(self) -> None:
        compiler_state.reset_dynamo()


def _may_use_cpu(test: Any) -> bool:
    return fsdp_devices.in_whole_world() or any(need.allow_cpu for need in needs_of(test))


def _keep_nccl_quiet() -> None:
    # "1" starts NCCL's clean-up thread, which has made tests fail at random.
    os.environ["TORCH_NCCL_DESYNC_DEBUG"] = "0"
