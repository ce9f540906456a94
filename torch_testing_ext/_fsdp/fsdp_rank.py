"""Runs a test of FSDP in a fresh rank: with a device, a process group, and between two barriers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from torch_testing_ext import _torch
from torch_testing_ext._machine.seeds import set_rng_seed

from . import fsdp_device


def run_in_group(test: Any, test_name: str, pipe: Any, fake: bool) -> None:
    """Run a test in the default group, which has no communication if it is `fake`."""
    device = fsdp_device.compute_device(test.rank)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    _init_process_group(test, fake)
    # No rank may skip and exit while others still connect to it or need its answers.
    _barrier(device)
    _torch.launch.reset_dynamo()
    set_rng_seed()
    test.run_test(test_name, pipe)
    _torch.launch.reset_dynamo()
    _barrier(device)
    dist.destroy_process_group()


def _init_process_group(test: Any, fake: bool) -> None:
    size = int(test.world_size)
    if fake:
        from torch_testing_ext._utils.fake_group import FakeStore

        dist.init_process_group(backend="fake", world_size=size, rank=test.rank, store=FakeStore())
        return
    backend = fsdp_device.backend_for(size)
    dist.init_process_group(backend, init_method=test.init_method, world_size=size, rank=test.rank)


def _barrier(device: torch.device) -> None:
    dist.barrier(device_ids=None if device.type == "cpu" else [device.index])
