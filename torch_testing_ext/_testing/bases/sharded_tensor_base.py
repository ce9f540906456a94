"""The base of tests of sharded tensors, and the decorator that gives them a process group and RPC."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import rpc

from torch_testing_ext._machine import accelerators, device_sharing
from torch_testing_ext._machine.backend_names import uses_nccl
from torch_testing_ext._testing.bases import shared_devices
from torch_testing_ext._testing.bases.multi_process import MultiProcessTestCase
from torch_testing_ext._testing.marks.collective_platforms import tp_transports
from torch_testing_ext._testing.marks.needs import Skipped, too_few_devices
from torch_testing_ext._torch.tensors import tensor_subclasses

# Keeps these frames out of tracebacks: the message is complete.
__unittest = True


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
            torch.accelerator.set_device_index(device_sharing.device_of(self.rank, accelerators.device_count()))

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
