"""The bases of DTensor tests: fresh ranks, persistent ranks, threads; and the process group around a test."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torch_testing_ext import _torch
from torch_testing_ext._cases.continuous import MultiProcContinuousTest
from torch_testing_ext._cases.distributed_base import run_subtests
from torch_testing_ext._cases.multi_process import MultiProcessTestCase
from torch_testing_ext._cases.multi_threaded import MultiThreadedTestCase
from torch_testing_ext._machine import accelerators
from torch_testing_ext._marks.distributed import ACCELERATOR_DIST_BACKENDS, skip_if_lt_x_gpu
from torch_testing_ext._marks.needs import Skipped, too_few_devices

from .devices_used import device_type, device_type_for, num_devices

__unittest = True  # keeps these frames out of unittest's tracebacks
__rank_frame__ = True  # and out of those of ranks

F = TypeVar("F", bound=Callable[..., Any])
TestFunc = Callable[..., object]


# -- decorators


def skip_unless_torch_gpu(method: F) -> F:
    """Skip unless there is an accelerator for each of NUM_DEVICES ranks."""
    return skip_if_lt_x_gpu(num_devices())(method)


def with_comms(eager_init: Any = False, backend: str | None = None) -> Any:
    """Run a test with the default process group, made by `init_pg` before it and gone after it, however it ends.

    Bare, or with arguments: `eager_init` binds the group to the rank's device at once, `backend` is used instead of
    the class's own. On a class without `init_pg` (ranks that are threads have their group already) it does nothing.
    """
    if callable(eager_init):
        return with_comms()(eager_init)

    def decorate(func: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(func)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
            if not hasattr(self, "init_pg"):
                func(self, *args, **kwargs)
                return
            try:
                self.init_pg(eager_init, backend)
                func(self, *args, **kwargs)
            except BaseException:
                _give_up_group(self)
                raise
            self.destroy_pg()

        return wrapper

    return decorate


def _give_up_group(test: Any) -> None:
    """After an error: its peers may be waiting in a collective, and what goes wrong here is not the news."""
    with suppress(Exception):
        _destroy(test)


def _destroy(test: Any) -> None:
    if not dist.is_initialized():
        return
    if getattr(test, "fast_exit", False):
        _torch.destroy_process_group()
    else:
        dist.destroy_process_group()


# -- bases


class DTensorTestMixin:
    """What a test of DTensor asks of its base, whatever its ranks are."""

    world_size: Any
    rank: Any

    @property
    def is_local_tensor_enabled(self) -> bool:
        return False

    @property
    def device_type(self) -> str:
        """The accelerator's, where there is one for each rank; else "cpu"."""
        return device_type_for(int(self.world_size))

    def build_device_mesh(self) -> DeviceMesh:
        """All ranks in one dimension."""
        return init_device_mesh(self.device_type, (int(self.world_size),))

    def init_manual_seed_for_rank(self) -> None:
        torch.manual_seed(self.rank)

    def run_subtests(self, *args: Any, **kwargs: Any) -> None:
        run_subtests(self, *args, **kwargs)  # type: ignore[arg-type]

    def _test_op(self, mesh: DeviceMesh, op_call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """`op_call` gives the same for every way to place its tensor arguments on `mesh` as for the tensors."""
        from . import op_checks

        op_checks.check_all_placements(self, mesh, op_call, args, kwargs)

    def _test_op_on_dtensor(self, op_call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """`op_call` gives the same for these DTensors as for the full tensors."""
        from . import op_checks

        op_checks.check_dtensors(self, op_call, args, kwargs)


class DTensorTestBase(DTensorTestMixin, MultiProcessTestCase):
    """Tests that run in NUM_DEVICES ranks, on an accelerator each or else all on CPU. See `with_comms`."""

    @property
    def world_size(self) -> int:
        return num_devices()

    @property
    def backend(self) -> str:
        return dist.get_default_backend_for_device(self.device_type)

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def init_pg(self, eager_init: bool, backend: str | None = None) -> None:
        """Make the default group; on an accelerator's backend each rank first takes the device of its number."""
        backend = backend or self.backend
        _check_known(backend)
        device_id = self._take_device(eager_init) if _needs_accelerator(backend) else None
        dist.init_process_group(
            backend=backend,
            world_size=self.world_size,
            rank=self.rank,
            init_method=f"file://{self.file_name}",
            device_id=device_id,
        )

    def _take_device(self, eager_init: bool) -> torch.device | None:
        """Only a group that knows its device from the start sets its communicator up at once."""
        if accelerators.device_count() < self.world_size:
            raise Skipped(too_few_devices(self.world_size))
        torch.accelerator.set_device_index(self.rank)
        return torch.device(self.device_type, self.rank) if eager_init else None

    def destroy_pg(self, device_id: int | None = None) -> None:
        """End the group when all ranks have come here, so that none leaves while another still needs it."""
        if not dist.is_initialized():
            return
        try:
            self._meet(device_id)
        except BaseException:
            _give_up_group(self)
            raise
        _destroy(self)

    def _meet(self, device_id: int | None) -> None:
        if self.device_type == "cpu":
            dist.barrier()
        else:
            own = torch.accelerator.current_device_index() if device_id is None else device_id
            dist.barrier(device_ids=[own])


class DTensorOpTestBase(MultiThreadedTestCase):
    """Tests that run in NUM_DEVICES threads: to try many operators, where starting processes would take longest."""

    @property
    def world_size(self) -> int:
        return num_devices()

    @property
    def device_type(self) -> str:
        return device_type()

    def build_device_mesh(self) -> DeviceMesh:
        """All ranks in one dimension."""
        return init_device_mesh(self.device_type, (int(self.world_size),))

    def setUp(self) -> None:
        super().setUp()
        importlib.import_module("torch.distributed.tensor")  # before there are threads, which take turns in it then
        self._spawn_threads()


class DTensorContinuousTestBase(DTensorTestMixin, MultiProcContinuousTest):  # type: ignore[misc]
    """Tests of a class in the same ranks, on an accelerator each or else all on CPU. Their group is there already."""

    @classmethod
    def backend_str(cls) -> str:
        return dist.get_default_backend_for_device(cls._device_type())

    @classmethod
    def _init_pg(cls, rank: int, world_size: int, rdvz_file: str) -> None:
        if device_type_for(world_size) != "cpu":
            torch.accelerator.set_device_index(rank)
        super()._init_pg(rank, world_size, rdvz_file)


def _check_known(backend: str) -> None:
    for name in _backend_names(backend):
        if name == "fake":
            _torch.register_fake_backend()
        if name not in dist.Backend.backend_list:
            known = ", ".join(sorted(set(dist.Backend.backend_list) - {"undefined"}))
            raise RuntimeError(f"Backend {backend} not supported! This torch knows: {known}")


def _needs_accelerator(backend: str) -> bool:
    return any(kind in name for name in _backend_names(backend) for kind in ACCELERATOR_DIST_BACKENDS)


def _backend_names(backend: str) -> list[str]:
    """Those that e.g. "cpu:gloo,cuda:nccl" names: gloo and nccl."""
    return [part.rpartition(":")[2].lower() for part in backend.split(",")]
