"""The bases of FSDP tests: with fresh ranks, persistent ranks or threads.

This module imports FSDP and tensor parallelism instead of leaving that to their first use: ranks are forked after the
test module is imported and inherit what it imported. No accelerator is touched.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from torch_testing_ext import _torch
from torch_testing_ext._cases.continuous import UNSET, MultiProcContinuousTest
from torch_testing_ext._cases.distributed_base import run_subtests
from torch_testing_ext._cases.multi_process import MultiProcessTestCase
from torch_testing_ext._cases.multi_threaded import MultiThreadedTestCase
from torch_testing_ext._machine import accelerators
from torch_testing_ext._machine.seeds import set_rng_seed
from torch_testing_ext._marks.needs import TEST_SKIPS, Skipped, TestSkip, first_unmet, needs_of, too_few_devices
from torch_testing_ext._utils.stores import FILE_SCHEMA

from . import fsdp_device
from .parity import FSDPTestMixin


def get_devtype() -> torch.device:
    return torch.device(fsdp_device.device_type())


class FSDPTest(FSDPTestMixin, MultiProcessTestCase):
    """A MultiProcessTestCase for FSDP: every rank has a process group, a device and a seed.

    There is one rank for each accelerator. On a machine without accelerators, a test skips unless it allows the CPU:
    `@skip_if_lt_x_gpu(n, allow_cpu=True)` runs there under gloo, in n ranks, at least 2. A subclass may override
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
        """The type of the accelerators, or "cpu" if there are fewer than the test needs."""
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
        # No rank may skip and exit while others still connect to it or need its answers.
        _barrier(device)
        _torch.reset_dynamo()
        set_rng_seed()
        self.run_test(test_name, pipe)
        _torch.reset_dynamo()
        _barrier(device)
        _torch.destroy_process_group()

    def _init_process_group(self, fake: bool) -> None:
        size = int(self.world_size)
        if fake:
            from torch_testing_ext._utils.fake_group import FakeStore

            dist.init_process_group(backend="fake", world_size=size, rank=self.rank, store=FakeStore())
            return
        backend = fsdp_device.backend()
        if not dist.is_backend_available(backend):
            raise Skipped(TEST_SKIPS["backend_unavailable"])
        dist.init_process_group(backend, init_method=self.init_method, world_size=size, rank=self.rank)


def _barrier(device: torch.device) -> None:
    dist.barrier(device_ids=None if device.type == "cpu" else [device.index])


class FSDPTestContinuous(FSDPTestMixin, MultiProcContinuousTest):
    """A MultiProcContinuousTest for FSDP, by default with one rank for each accelerator.

    On a machine without accelerators, a test skips unless it allows the CPU, and there are two ranks.
    """

    @classmethod
    def backend_str(cls) -> str:
        return fsdp_device.backend()

    @classmethod
    def device_type(cls) -> str:
        return fsdp_device.device_type()

    @classmethod
    def _get_world_size(cls, device_type: str) -> Any:
        is_default_on_cpu = device_type == "cpu" and cls.world_size == UNSET
        return 2 if is_default_on_cpu else super()._get_world_size(device_type)

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
    """A MultiThreadedTestCase for FSDP, with one thread for each device."""

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
    # "1" starts NCCL's clean-up thread, which has made tests fail at random.
    os.environ["TORCH_NCCL_DESYNC_DEBUG"] = "0"
