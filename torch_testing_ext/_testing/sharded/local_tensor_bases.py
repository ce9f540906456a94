"""Bases for tests of DTensor in one process: a local tensor holds the tensors of all ranks.

Such a test runs the same code as real ranks do, for all ranks at once, without other processes or a network.
"""

import functools
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torch_testing_ext._testing.bases.continuous import UNSET
from torch_testing_ext._torch import compiler_state
from torch_testing_ext._torch.groups import dataless_groups
from torch_testing_ext._torch.tensors import dtensor_parts

from .dtensor_bases import DTensorContinuousTestBase, DTensorOpTestBase, DTensorTestBase
from .dtensor_devices import num_devices


class _SimulatedRanks:
    """Simulates all ranks in this process, which is rank 0 of `world_size` in a fake group."""

    world_size: Any

    @property
    def is_local_tensor_enabled(self) -> bool:
        return True

    @property
    def rank(self) -> Any:
        """A symbolic integer whose value in each rank is that rank's number."""
        return dtensor_parts.local_ranks(int(self.world_size))

    @rank.setter
    def rank(self, rank: int) -> None: ...

    def _is_rank(self) -> bool:
        return False

    def _replacement_for(self, test: Callable[[], Any]) -> Callable[[], None]:
        return self.join_or_run(test)

    def join_or_run(self, fn: Callable[[], Any]) -> Callable[[], None]:
        @functools.wraps(fn)
        def run() -> None:
            fn()

        return run

    def setUp(self: Any) -> None:
        super().setUp()  # type: ignore[misc]
        # Autograd's events for profilers cannot contain local tensors.
        dtensor_parts.record_autograd(False)
        self.addCleanup(dtensor_parts.record_autograd, True)
        self.addCleanup(dtensor_parts.forget_dtensor_rng)

    def run_test(self, test_name: str, parent_pipe: Any) -> None:
        getattr(self, test_name)()

    def build_device_mesh(self) -> DeviceMesh:
        with dtensor_parts.without_local_tensors():
            mesh: DeviceMesh = super().build_device_mesh()  # type: ignore[misc]
        return mesh

    def init_manual_seed_for_rank(self) -> None:
        # One generator serves all ranks.
        torch.manual_seed(0)

    def _handle_test_skip(self: Any, msg: str) -> None:
        self.skipTest(msg)

    def _get_local_tensor_mode(self) -> Any:
        return dtensor_parts.local_tensor_mode(int(self.world_size))


class _GroupPerTest:
    """Lets `with_comms` create and destroy a fake group for each test."""

    world_size: Any

    def init_pg(self, eager_init: bool, backend: str | None = None) -> None:
        _init_fake_group(int(self.world_size))

    def destroy_pg(self, device_id: int | None = None) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def _init_fake_group(world_size: int) -> None:
    dataless_groups.register_fake_backend()
    dist.init_process_group("fake", rank=0, world_size=world_size)


class LocalDTensorTestBase(_SimulatedRanks, _GroupPerTest, DTensorTestBase):
    """A DTensorTestBase on local tensors."""

    def _spawn_processes(self) -> None: ...


class LocalDTensorOpTestBase(_SimulatedRanks, _GroupPerTest, DTensorOpTestBase):
    """A DTensorOpTestBase on local tensors."""

    def _spawn_threads(self) -> None: ...


class LocalDTensorContinuousTestBase(_SimulatedRanks, DTensorContinuousTestBase):  # type: ignore[misc]
    """A DTensorContinuousTestBase on local tensors, with one group for all tests of the class."""

    @classmethod
    def _ensure_processes_spawned(cls) -> None:
        if cls.world_size == UNSET:
            cls.world_size = num_devices()
        if not dist.is_initialized():
            _init_fake_group(int(cls.world_size))

    def _start_task(self) -> None:
        self._ensure_processes_spawned()

    @classmethod
    def tearDownClass(cls) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        super().tearDownClass()


def create_local_tensor_test_class(
    orig_cls: type, skipped_tests: Collection[str] | None = None, base_class: type = LocalDTensorTestBase
) -> type:
    """Derive a class from `orig_cls` that runs its tests on local tensors; its name ends in "WithLocalTensor".

    Call it before or after the parametrized tests are instantiated. The new class skips `skipped_tests`.
    """

    def skip(self: Any) -> None:
        self.skipTest("does not run on local tensors")

    name_of_class = f"{orig_cls.__name__}WithLocalTensor"
    body = {"__qualname__": name_of_class}
    for name, value in vars(orig_cls).items():
        if name in ("__dict__", "__weakref__", "__qualname__"):
            continue
        if name in (skipped_tests or ()):
            value = skip
        elif name.startswith("test_") and callable(value):
            value = make_wrapped(value, [lambda test: test._get_local_tensor_mode()])
        body[name] = value
    return type(name_of_class, (base_class, *orig_cls.__bases__), body)


def make_wrapped(fn: Callable[..., Any], ctxs: Iterable[Any]) -> Callable[..., Any]:
    """Wrap a test method to run within these contexts, each a context or a function from the test to one."""

    @functools.wraps(fn)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        compiler_state.reset_dynamo()
        with ExitStack() as stack:
            for context in ctxs:
                stack.enter_context(context(self) if callable(context) else context)
            return fn(self, *args, **kwargs)

    return wrapped


def reduce_local_int(val: Any, func: Callable[[dict[int, int]], Any]) -> Any:
    """Call `func` with a dictionary from rank to the value of this integer."""
    return func(dtensor_parts.local_ints(val))


@dtensor_parts.for_each_local_rank
def map_local_tensor_for_rank(tensor: Any, rank: Any, func: Callable[[Any, Any], Any]) -> Any:
    """Call `func(tensor, rank)` as each rank would, and combine the results to a local tensor."""
    return func(tensor, rank)


@dtensor_parts.for_each_local_rank
def map_local_for_rank(rank: Any, func: Callable[[Any], Any]) -> Any:
    """Call `func(rank)` as each rank would, and combine the results to a local tensor."""
    return func(rank)
