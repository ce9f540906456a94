"""The value of the fixture `dist_env`: this rank, its device, and the process group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torch_testing_ext._cases import shared_devices
from torch_testing_ext.launch import settings

from .marks import RankSpec

_FileStore: Any = dist.FileStore  # type: ignore[attr-defined, unused-ignore]  # from C++


@dataclass(frozen=True)
class DistEnv:
    """One rank of a test, and the process group over all of them, which exists already."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str
    group: Any = field(repr=False)
    store: Any = field(repr=False)  # the rendezvous of the group


def make(spec: RankSpec, directory: Path, rank: int) -> Iterator[DistEnv]:
    """Choose the device of this rank and make the group, which the rank destroys when it ends."""
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    device = torch.device("cpu")
    if spec.devices and not settings.read().fake_devices:
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None, "the parent has counted accelerators"
        device = torch.device(accelerator.type, local_rank % torch.accelerator.device_count())
        torch.accelerator.set_device_index(device.index)
    backend = spec.backend or _backend_for(device, spec)
    store = _FileStore(str(directory / "store"), spec.world_size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=spec.world_size)
    env = DistEnv(rank, spec.world_size, local_rank, device, backend, dist.group.WORLD, store)
    yield env
    vars(env).update(group=None, store=None)  # the group ends with the test


def _backend_for(device: torch.device, spec: RankSpec) -> str:
    """Choose the accelerator's backend if each rank has a device of its own; two ranks on one device need gloo."""
    if spec.devices < spec.world_size or device.type == "cpu":
        return "gloo"
    return shared_devices.backend_of(device.type, spec.world_size)
