"""The device that the FSDP helpers use: the machine's accelerator, or the CPU if there is none.

`use_device_type` keeps a rank on the CPU, for a test that needs more devices than the machine has and allows the CPU. A
whole world is on the CPU. A test file may set DEVICE_TYPE, DEVICE_COUNT and DISTRIBUTED_BACKEND in the mirror.
Importing this module asks no driver; the first call does.
"""

from __future__ import annotations

import time
from enum import Enum, auto
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torch_testing_ext._machine import accelerators, device_sharing
from torch_testing_ext._machine.random_state import set_rng_seed
from torch_testing_ext._machine.shared_names import ComputedNames
from torch_testing_ext._testing.bases import shared_devices
from torch_testing_ext._testing.marks import device_cycles
from torch_testing_ext._torch import compiler_state
from torch_testing_ext.faults.in_ranks import loses_ranks
from torch_testing_ext.launch.aspects.world import SIZE

_chosen: str | None = None


class DEVICEInitMode(Enum):
    """The time when a test model moves to the device: before FSDP wraps it, after that, or never."""

    DEVICE_BEFORE = auto()
    DEVICE_AFTER = auto()
    DEVICE_NEVER = auto()


def use_device_type(device_type: str | None) -> None:
    """Let this process keep its models on `device_type`; None: on the machine's accelerator, if there is one."""
    global _chosen
    _chosen = device_type


def in_whole_world() -> bool:
    """Whether tests in ranks run without communication."""
    return SIZE.value() is not None


def _type() -> str:
    if in_whole_world():
        return "cpu"
    return _chosen or accelerators.accelerator_type() or "cpu"


# As in PyTorch, setting one does not change the others.
constants: Any = ComputedNames(
    DEVICE_TYPE=_type,
    DEVICE_COUNT=lambda: 1 if _type() == "cpu" else accelerators.device_count(),
    DISTRIBUTED_BACKEND=lambda: torch.distributed.get_default_backend_for_device(_type()),
)


def device_type() -> str:
    return str(constants.DEVICE_TYPE)


def device_count() -> int:
    """Return the number of devices of that type; 1 for the CPU."""
    return int(constants.DEVICE_COUNT)


def default_backend() -> str:
    """Return the default backend of that device: nccl, xccl, hccl, ..., gloo."""
    return str(constants.DISTRIBUTED_BACKEND)


def backend_for(world_size: int) -> str:
    """Return the backend of a group of this size on that device, which may be another if ranks share devices."""
    if constants.is_set("DISTRIBUTED_BACKEND"):
        return default_backend()
    return shared_devices.backend_of(device_type(), world_size)


def most_ranks_here() -> int:
    """Return how many ranks may use an accelerator, by what torch counts now: a test may have changed that."""
    return torch.accelerator.device_count() * device_sharing.ranks_per_device()


def compute_device(rank: int) -> torch.device:
    device = torch.device(device_type())
    return device if device.type == "cpu" else torch.device(device.type, rank % device_count())


def move_if_now(module: nn.Module, mode: DEVICEInitMode, now: DEVICEInitMode) -> nn.Module:
    """Move `module` to the device if `mode` equals `now`."""
    return module.to(device_type()) if mode is now else module


def delay(milliseconds: float) -> None:
    """Keep the device busy for this time. On CUDA the stream waits and the host goes on, as after a slow kernel."""
    if milliseconds <= 0 or device_type() == "cpu":
        return
    if device_type() == "cuda":
        device_cycles.device_sleep("cuda", int(milliseconds * device_cycles.get_cycles_per_ms()))
    else:
        time.sleep(milliseconds / 1000)


def run_in_group(test: Any, test_name: str, pipe: Any, fake: bool) -> None:
    """Run a test in the default group, which has no communication if it is `fake`."""
    device = compute_device(test.rank)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    _init_process_group(test, fake)
    # No rank may skip and exit while others still connect to it or need its answers.
    _barrier(device)
    compiler_state.reset_dynamo()
    set_rng_seed()
    test.run_test(test_name, pipe)
    compiler_state.reset_dynamo()
    if not loses_ranks():
        _barrier(device)
        dist.destroy_process_group()
    elif dist.is_initialized():
        dist.destroy_process_group()


def _init_process_group(test: Any, fake: bool) -> None:
    size = int(test.world_size)
    if fake:
        from torch_testing_ext._testing.bases.fake_groups import FakeStore

        dist.init_process_group(backend="fake", world_size=size, rank=test.rank, store=FakeStore())
        return
    backend = backend_for(size)
    dist.init_process_group(backend, init_method=test.init_method, world_size=size, rank=test.rank)


def _barrier(device: torch.device) -> None:
    dist.barrier(device_ids=None if device.type == "cpu" else [device.index])
