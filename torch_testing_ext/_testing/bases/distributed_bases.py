"""DistributedTestBase, ShardedTensorTestBase, and the bases of tests of the compiler over process groups."""

import functools
import itertools
import unittest
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import rpc

from torch_testing_ext._machine import accelerators, device_rules
from torch_testing_ext._machine.device_rules import uses_nccl
from torch_testing_ext._testing.bases import shared_devices
from torch_testing_ext._testing.bases.multi_process import MultiProcessTestCase
from torch_testing_ext._testing.helpers.contexts import changed_environment
from torch_testing_ext._testing.marks.collective_platforms import tp_transports
from torch_testing_ext._testing.marks.needs import TEST_SKIPS, Skipped, TestSkip, most_needed, too_few_devices
from torch_testing_ext._torch import compiler_state
from torch_testing_ext._torch.tensors import tensor_subclasses
from torch_testing_ext.launch.aspects import devices

from .test_case import TestCase

# --------------------------------------------------------------------------------------------------------------------
# DistributedTestBase, whose ranks choose their backend by device type, and run_subtests.

# Keeps these frames out of tracebacks.
__unittest = True


_FileStore: Any = dist.FileStore  # type: ignore[attr-defined, unused-ignore]  # from C++


class DistributedTestBase(MultiProcessTestCase):
    """A MultiProcessTestCase that starts its ranks and chooses the backend by device type."""

    def setUp(self) -> None:
        super().setUp()
        setting = changed_environment(WORLD_SIZE=str(self.world_size))
        setting.__enter__()
        self.addCleanup(setting.__exit__, None, None, None)
        self._spawn_processes()

    def backend(self, device: str) -> str:
        if "cuda" in device:
            return shared_devices.backend_of_shared_devices() if devices.are_shared(int(self.world_size)) else "nccl"
        if "hpu" in device:
            return "hccl"
        kind, _, _ = device.partition(":")
        return dist.Backend.default_device_backend_map.get(kind, "gloo")

    def create_pg(self, device: str, world_size: int | None = None, backend: str | None = None) -> Any:
        """Create the default group over all ranks, with the backend for `device`; set each rank's accelerator."""
        world_size = self.world_size if world_size is None else world_size
        if backend is not None:
            shared_devices.check_backend(backend, int(world_size))
        backend = backend or self.backend(device)
        on_shared = "cuda" in device and devices.are_shared(int(world_size))
        if accelerators.need_accelerators(backend) or on_shared:
            self._use_device()
        store = _FileStore(self.file_name, world_size)
        dist.init_process_group(backend=backend, world_size=world_size, rank=self.rank, store=store)
        return dist.group.WORLD

    def _use_device(self) -> None:
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None:
            raise RuntimeError("the backend of an accelerator needs an accelerator, but this machine has none")
        index = self.rank
        if devices.are_shared(int(self.world_size)):
            index = device_rules.device_of(self.rank, accelerators.device_count())
        device = torch.device(accelerator.type, index)
        torch.set_default_device(device)
        torch.accelerator.set_device_index(index)

    def rank_to_device(self, device: str) -> dict[int, list[int]]:
        count = torch.get_device_module(device).device_count()
        return {rank: [rank % count] for rank in range(self.world_size)}


def run_subtests(
    cls_inst: unittest.TestCase,
    subtest_config: dict[str, list[Any]],
    test_fn: Callable[..., Any],
    *test_args: Any,
    **test_kwargs: Any,
) -> None:
    """Call `test_fn` for every combination of the configuration's values, each as a subtest with a barrier after it."""
    names = list(subtest_config)
    for values in itertools.product(*subtest_config.values()):
        chosen = dict(zip(names, values, strict=True))
        with cls_inst.subTest(**chosen):
            compiler_state.reset_dynamo()
            test_fn(*test_args, **test_kwargs, **chosen)
            compiler_state.reset_dynamo()
        dist.barrier()


# --------------------------------------------------------------------------------------------------------------------
# The base of tests of sharded tensors, and the decorator that gives them a process group and RPC.

# Keeps these frames out of unittest's tracebacks.

TEST_GPU_NUM = 4

# Untyped in torch.
_init_rpc: Any = rpc.init_rpc


class ShardedTensorTestBase(MultiProcessTestCase):
    """Tests of sharded tensors on four ranks; `with_comms` creates their group."""

    @property
    def world_size(self) -> int:
        return TEST_GPU_NUM

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def init_pg(self, backend: str = "nccl") -> None:
        if not dist.is_backend_available(backend):
            raise RuntimeError(f"Backend {backend} not supported!")
        dist.init_process_group(
            backend=backend, world_size=self.world_size, rank=self.rank, init_method=f"file://{self.file_name}"
        )
        # gloo is the backend of devices without an index, too.
        if backend != "gloo" and accelerators.device_count():
            torch.accelerator.set_device_index(device_rules.device_of(self.rank, accelerators.device_count()))

    def init_rpc(self) -> None:
        """Start RPC, in which worker N owns device N if there are devices."""
        options = rpc.TensorPipeRpcBackendOptions(
            init_method=f"file://{self.file_name}", **tensor_subclasses.rpc_transports(tp_transports())
        )
        for rank in range(self.world_size if accelerators.device_count() else 0):
            options.set_device_map(f"worker{rank}", {rank: self.rank, self.rank: rank})
        _init_rpc(name=f"worker{self.rank:d}", rank=self.rank, world_size=self.world_size, rpc_backend_options=options)

    def init_comms(self, init_rpc: bool = True, backend: str = "nccl") -> None:
        if init_rpc:
            self.init_rpc()
        self.init_pg(backend=backend)

    def destroy_comms(self, destroy_rpc: bool = True) -> None:
        # No rank shuts down while another still needs it.
        dist.barrier()
        if destroy_rpc:
            rpc.shutdown()
        dist.destroy_process_group()

    def assert_sharded_tensor_equal(self, st1: Any, st2: Any) -> None:
        """Compare local shards, metadata, and specifications."""
        ours, theirs = st1.local_shards(), st2.local_shards()
        self.assertEqual(len(ours), len(theirs))
        for shard, other in zip(ours, theirs, strict=True):
            self.assertEqual(shard.tensor, other.tensor)
            self.assertEqual(shard.metadata, other.metadata)
        self.assertEqual(st1.metadata(), st2.metadata())
        self.assertEqual(st1.sharding_spec(), st2.sharding_spec())
        self.assertEqual(len(st1.remote_shards()), len(st2.remote_shards()))


def with_comms(func: Callable[..., Any] | None = None, init_rpc: bool = True, backend: str = "nccl") -> Any:
    """Decorator, with or without arguments: create the group, and RPC if wanted, and destroy both at the end.

    A backend other than gloo skips the test unless it is that of the machine's accelerators, with one for each rank.
    """
    if func is None:
        return functools.partial(with_comms, init_rpc=init_rpc, backend=backend)

    @functools.wraps(func)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        if backend != "gloo" and not _is_usable(backend, self.world_size):
            raise Skipped(too_few_devices(self.world_size))
        self.init_comms(init_rpc=init_rpc, backend=backend)
        func(self, *args, **kwargs)
        self.destroy_comms(destroy_rpc=init_rpc)

    return wrapper


def _is_usable(backend: str, ranks: int) -> bool:
    kind = accelerators.accelerator_type()
    if kind is None or accelerators.most_ranks() < ranks:
        return False
    usual = shared_devices.backend_of(kind, ranks)
    return usual == backend or (usual == "nccl" and uses_nccl(backend))


# --------------------------------------------------------------------------------------------------------------------
# Bases for tests of the compiler over process groups; each test starts with empty compiler caches.

_HashStore: Any = dist.HashStore  # type: ignore[attr-defined, unused-ignore]  # from C++


class DynamoDistributedSingleProcTestCase(TestCase):
    """Runs all tests of the class in this process, as a group of one rank; on the CPU if there is no accelerator."""

    rank: int
    device: str
    device_ids: list[int] | None
    _exit_stack: ExitStack

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls._exit_stack = ExitStack()
        cls._exit_stack.enter_context(compiler_state.strict_dynamo())
        kind = accelerators.accelerator_type() or "cpu"
        cls.rank = 0
        cls.device = f"{kind}:{cls.rank}"
        cls.device_ids = None
        # A group of one needs no port.
        backend = dist.get_default_backend_for_device(kind)
        dist.init_process_group(backend, store=_HashStore(), rank=cls.rank, world_size=1)
        cls._exit_stack.callback(dist.destroy_process_group)

    @classmethod
    def tearDownClass(cls) -> None:
        cls._exit_stack.close()
        super().tearDownClass()

    def setUp(self) -> None:
        super().setUp()
        compiler_state.forget_compiled()

    def tearDown(self) -> None:
        compiler_state.forget_compiled()
        super().tearDown()


class DynamoDistributedMultiProcTestCase(DistributedTestBase):
    """Runs a rank on every accelerator; a subclass that runs without accelerators sets `world_size`."""

    @property
    def world_size(self) -> int:
        return accelerators.ranks_for(most_needed([getattr(self, self._testMethodName, None)]))

    def _known_skip(self) -> TestSkip | None:
        return super()._known_skip() if int(self.world_size) else TEST_SKIPS["no_accelerator"]

    @classmethod
    def _run(cls, rank: int, test_name: str, file_name: str, pipe: Any, **kwargs: Any) -> None:
        compiler_state.forget_compiled()
        super()._run(rank, test_name, file_name, pipe, **kwargs)
