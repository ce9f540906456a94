"""A world of process groups for each thread, for ranks that are threads."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist


def world_class() -> type:
    """Return the class of c10d's state about its groups. `distributed_c10d._World`: 2.11 to 2.15."""
    return dist.distributed_c10d._World


def get_world() -> Any:
    """Return c10d's state about its groups. `distributed_c10d._world`: 2.11 to 2.15."""
    return dist.distributed_c10d._world


def set_world(world: Any) -> None:
    dist.distributed_c10d._world = world


def isolate_threads(isolated: bool) -> None:
    """Give each thread its own registry of groups, or not. `_set_thread_isolation_mode`: 2.11 to 2.15."""
    torch._C._distributed_c10d._set_thread_isolation_mode(isolated)  # type: ignore[attr-defined]


def backend_plugin(name: str) -> Any:
    """Return the plugin that creates the groups of a registered backend. `Backend._plugins`: 2.11 to 2.15."""
    return dist.Backend._plugins[name.upper()]


def set_backend_plugin(name: str, plugin: Any) -> None:
    dist.Backend._plugins[name.upper()] = plugin


def finished_work(result: Any) -> dist.Work:
    """Return a completed Work. `_create_work_from_future`: 2.11 to 2.15."""
    future: Any = torch.futures.Future()
    future.set_result(result)
    work: dist.Work = torch._C._distributed_c10d._create_work_from_future(future)  # type: ignore[attr-defined, unused-ignore]
    return work


@contextmanager
def one_sharding_at_a_time() -> Iterator[None]:
    """Serialise the sharding propagation of DTensor, if it is imported: its fake tensors are not thread-safe.

    `ShardingPropagator._fake_mode_lock` since 2.12, by default a lock without effect; 2.11 has none.
    """
    module: Any = sys.modules.get("torch.distributed.tensor._sharding_prop")
    if not hasattr(getattr(module, "ShardingPropagator", None), "_fake_mode_lock"):
        yield
        return
    # A lock, and no function.
    with mock.patch.object(module.ShardingPropagator, "_fake_mode_lock", threading.Lock()):
        yield
