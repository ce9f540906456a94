"""The value of the fixture `dist_env`: this rank, its device, and the process group."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torch_testing_ext._pytest_ranks.marks import RankSpec
from torch_testing_ext._testing.bases import shared_devices
from torch_testing_ext._testing.bases.values_of_fixtures import DistEnv, Ranks
from torch_testing_ext.launch.aspects.devices import FAKE

_FileStore: Any = dist.FileStore  # type: ignore[attr-defined, unused-ignore]  # from C++


def rank_of(spec: RankSpec, rank: int) -> Ranks:
    """Choose the device of a rank."""
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    device = torch.device("cpu")
    if spec.devices and not FAKE.value():
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None, "the parent has counted accelerators"
        device = torch.device(accelerator.type, local_rank % torch.accelerator.device_count())
        torch.accelerator.set_device_index(device.index)
    node = int(os.environ.get("GROUP_RANK", 0))
    return Ranks(rank, spec.world_size, local_rank, node, device, spec.devices)


def open_dist_env(spec: RankSpec, directory: Path, rank: int) -> Iterator[DistEnv]:
    """Choose the device of this rank and make the group, which the rank destroys when it ends."""
    rank_env = rank_of(spec, rank)
    store = None
    if spec.init is None:
        store = _FileStore(str(directory / "store"), spec.world_size)
        backend = spec.backend or _backend_for(rank_env.device, spec)
        dist.init_process_group(backend, store=store, rank=rank, world_size=spec.world_size)
    else:
        backend = _make_by(spec.init, rank_env)
    env = DistEnv(**vars(rank_env), backend=backend, store=store)
    yield env
    # The store ends with the test.
    vars(env).update(store=None)


def _make_by(init: Callable[..., object], rank_env: Ranks) -> str:
    """Let a function of the project make the group. It gets the rank if it requires an argument."""
    parameters = inspect.signature(init).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [parameter for parameter in parameters if parameter.kind in kinds]
    if any(parameter.default is inspect.Parameter.empty for parameter in positional):
        init(rank_env)
    else:
        init()
    if not dist.is_initialized():
        raise RuntimeError(f"{getattr(init, '__qualname__', init)}, the init of the mark, made no process group")
    return str(dist.get_backend())


def _backend_for(device: torch.device, spec: RankSpec) -> str:
    """Choose the accelerator's backend if each rank has a device of its own; two ranks on one device need gloo."""
    if spec.devices < spec.world_size or device.type == "cpu":
        return "gloo"
    return shared_devices.backend_of(device.type, spec.world_size)
