"""The bases of DTensor tests, with fresh ranks, persistent ranks or threads; and `with_comms`."""

import functools
import importlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torch_testing_ext._machine import accelerators, device_sharing
from torch_testing_ext._machine.backend_names import names_in
from torch_testing_ext._testing.bases import rank_life, shared_devices
from torch_testing_ext._testing.bases.continuous import MultiProcContinuousTest
from torch_testing_ext._testing.bases.distributed_bases import run_subtests
from torch_testing_ext._testing.bases.multi_process import MultiProcessTestCase
from torch_testing_ext._testing.bases.multi_threaded import MultiThreadedTestCase
from torch_testing_ext._testing.bases.ranked_test_case import checked_world_size
from torch_testing_ext._testing.marks.distributed_needs import skip_if_lt_x_gpu
from torch_testing_ext._testing.marks.needs import Skipped, too_few_devices
from torch_testing_ext._torch.groups import dataless_groups
from torch_testing_ext.faults.in_ranks import loses_ranks
from torch_testing_ext.launch import device_leases

from .dtensor_devices import device_type, device_type_for, num_devices

# Keeps these frames out of tracebacks.
__unittest = True
F = TypeVar("F", bound=Callable[..., Any])
TestFunc = Callable[..., object]


def skip_unless_torch_gpu(method: F) -> F:
    """Skip unless there is an accelerator for each of NUM_DEVICES ranks."""
    skip: Callable[[F], F] = skip_if_lt_x_gpu(num_devices())
    wrapper: Any = skip(method)
    # What collection-time tools read: the number of devices below which the test makes no sense on any machine.
    wrapper._min_gpus_required = 2
    return cast(F, wrapper)


def with_comms(eager_init: Any = False, backend: str | None = None) -> Any:
    """Decorator, with or without arguments: create the default process group by `init_pg`, and destroy it at the end.

    `eager_init` binds the group to the rank's device at once; `backend` replaces the class's own. On a class without
    `init_pg`, the decorator does nothing: ranks that are threads have a group already.
    """
    if callable(eager_init):
        return with_comms()(eager_init)

    def decorate(func: Callable[..., Any]) -> Callable[..., None]:
        """Run a test between `init_pg` and `destroy_pg`."""

        @functools.wraps(func)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
            if not hasattr(self, "init_pg"):
                func(self, *args, **kwargs)
                return
            try:
                self.init_pg(eager_init, backend)
                func(self, *args, **kwargs)
            except BaseException:
                _destroy_after_error()
                raise
            self.destroy_pg()

        return wrapper

    return decorate


def _destroy_after_error() -> None:
    """Destroy the group without a barrier, as its peers may wait in another collective; keep the original error."""
    with suppress(Exception):
        rank_life.leave_process_group(fast=False)


class DTensorTestMixin:
    """The interface of all bases for tests of DTensor, whether their ranks are processes or simulated."""

    world_size: Any
    rank: Any

    @property
    def is_local_tensor_enabled(self) -> bool:
        return False

    @property
    def device_type(self) -> str:
        """The type of the accelerators, if there is one for each rank; else "cpu"."""
        return device_type_for(int(self.world_size))

    def build_device_mesh(self) -> DeviceMesh:
        """Create a mesh of all ranks in one dimension."""
        return init_device_mesh(self.device_type, (int(self.world_size),))

    def init_manual_seed_for_rank(self) -> None:
        torch.manual_seed(self.rank)

    def run_subtests(self, *args: Any, **kwargs: Any) -> None:
        run_subtests(self, *args, **kwargs)  # type: ignore[arg-type]

    def _test_op(self, mesh: DeviceMesh, op_call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Assert that `op_call` returns the same result for its tensors and for all their placements on `mesh`."""
        from . import dtensor_converter

        dtensor_converter.check_all_placements(self, mesh, op_call, args, kwargs)

    def _test_op_on_dtensor(self, op_call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Assert that `op_call` returns the same result for these DTensors and for the full tensors."""
        from . import dtensor_converter

        dtensor_converter.check_dtensors(self, op_call, args, kwargs)


class DTensorTestBase(DTensorTestMixin, MultiProcessTestCase):
    """A MultiProcessTestCase for DTensor: NUM_DEVICES ranks, each on an accelerator, or else all on the CPU.

    See `with_comms`.
    """

    @property
    def world_size(self) -> int:
        return num_devices()

    @property
    def backend(self) -> str:
        return shared_devices.backend_of(self.device_type, int(self.world_size))

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def init_pg(self, eager_init: bool, backend: str | None = None) -> None:
        """Create the default group; for an accelerator's backend, each rank first selects the device of its number."""
        if backend is not None:
            shared_devices.check_backend(backend, int(self.world_size))
        backend = backend or self.backend
        _check_known(backend)
        on_shared = self.device_type != "cpu" and device_leases.are_shared(int(self.world_size))
        device_id = self._select_device(eager_init) if on_shared or accelerators.need_accelerators(backend) else None
        dist.init_process_group(
            backend=backend,
            world_size=self.world_size,
            rank=self.rank,
            init_method=f"file://{self.file_name}",
            device_id=device_id,
        )

    def _select_device(self, eager_init: bool) -> torch.device | None:
        """Select the rank's device; return it for eager initialisation, which needs a group bound to its device."""
        if accelerators.most_ranks() < self.world_size:
            raise Skipped(too_few_devices(self.world_size))
        index = device_sharing.device_of(self.rank, accelerators.device_count())
        torch.accelerator.set_device_index(index)
        return torch.device(self.device_type, index) if eager_init else None

    def destroy_pg(self, device_id: int | None = None) -> None:
        """Destroy the group once all ranks arrive here, so that none exits while another still needs it."""
        if not dist.is_initialized():
            return
        try:
            if not loses_ranks():
                self._barrier(device_id)
        except BaseException:
            _destroy_after_error()
            raise
        dist.destroy_process_group()

    def _barrier(self, device_id: int | None) -> None:
        if self.device_type == "cpu":
            dist.barrier()
        else:
            own = torch.accelerator.current_device_index() if device_id is None else device_id
            dist.barrier(device_ids=[own])


class DTensorOpTestBase(DTensorTestMixin, MultiThreadedTestCase):
    """A MultiThreadedTestCase for DTensor, with NUM_DEVICES threads: for many operators in short tests."""

    @property
    def world_size(self) -> int:
        return num_devices()

    @property
    def device_type(self) -> str:
        return device_type()

    def setUp(self) -> None:
        super().setUp()
        # RankThreads locks its sharding only if it is imported.
        importlib.import_module("torch.distributed.tensor")
        self._spawn_threads()


class DTensorContinuousTestBase(DTensorTestMixin, MultiProcContinuousTest):  # type: ignore[misc]
    """A MultiProcContinuousTest for DTensor: each rank on an accelerator, or else all on the CPU."""

    @classmethod
    def backend_str(cls) -> str:
        size = checked_world_size(cls._get_world_size(cls._device_type()), "world_size")
        return shared_devices.backend_of(cls._device_type(), size)

    @classmethod
    def _init_pg(cls, rank: int, world_size: int, rdvz_file: str) -> None:
        if device_type_for(world_size) != "cpu":
            torch.accelerator.set_device_index(device_sharing.device_of(rank, accelerators.device_count()))
        super()._init_pg(rank, world_size, rdvz_file)


def _check_known(backend: str) -> None:
    for name in names_in(backend):
        if name == "fake":
            dataless_groups.register_fake_backend()
        # torch registers some of its backends when it is asked for them.
        if not dist.is_backend_available(name) and name not in dist.Backend.backend_list:
            known = ", ".join(sorted(set(dist.Backend.backend_list) - {"undefined"}))
            raise RuntimeError(f"Backend {backend} not supported! This torch knows: {known}")
