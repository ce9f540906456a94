"""What ranks that are threads need of torch: a world of process groups for each thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist


def world_class() -> type:
    """The class of what c10d knows of its groups. `distributed_c10d._World`: 2.11 to 2.15."""
    return dist.distributed_c10d._World


def get_world() -> Any:
    """`distributed_c10d._world`: 2.11 to 2.15."""
    return dist.distributed_c10d._world


def set_world(world: Any) -> None:
    dist.distributed_c10d._world = world


def isolate_threads(isolated: bool) -> None:
    """Does each thread have a registry of groups by name of its own? `_set_thread_isolation_mode`: 2.11 to 2.15."""
    torch._C._distributed_c10d._set_thread_isolation_mode(isolated)  # type: ignore[attr-defined]


def finished_work(result: Any) -> dist.Work:
    """A Work that is done. `_create_work_from_future`: 2.11 to 2.15."""
    future: Any = torch.futures.Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)  # type: ignore[attr-defined]


@contextmanager
def thread_safe_sharding_propagation() -> Iterator[None]:
    """DTensor's sharding rules are tried on fake tensors, by one thread at a time. `_fake_mode_lock` of the
    propagator since 2.10; it does not lock by itself."""
    from torch.distributed.tensor import _sharding_prop

    ShardingPropagator: Any = _sharding_prop.ShardingPropagator
    before = ShardingPropagator._fake_mode_lock
    ShardingPropagator._fake_mode_lock = threading.Lock()
    try:
        yield
    finally:
        ShardingPropagator._fake_mode_lock = before
