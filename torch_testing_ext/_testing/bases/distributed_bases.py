"""DistributedTestBase, whose ranks choose their backend by device type, and run_subtests."""

import itertools
import unittest
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from torch_testing_ext._machine import accelerators, device_sharing
from torch_testing_ext._testing.bases import shared_devices
from torch_testing_ext._testing.bases.multi_process import MultiProcessTestCase
from torch_testing_ext._testing.helpers.contexts import changed_environment
from torch_testing_ext._torch import compiler_state
from torch_testing_ext.launch import device_leases

# Keeps these frames out of tracebacks: the message is complete.
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
            return (
                shared_devices.backend_of_shared_devices() if device_leases.are_shared(int(self.world_size)) else "nccl"
            )
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
        on_shared = "cuda" in device and device_leases.are_shared(int(world_size))
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
        if device_leases.are_shared(int(self.world_size)):
            index = device_sharing.device_of(self.rank, accelerators.device_count())
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
