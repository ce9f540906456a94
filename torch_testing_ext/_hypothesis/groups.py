"""The default process group that examples run in: shared by all examples, and replaced after each that broke it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torch_testing_ext import _torch

from .connections import Connections

# A wait in a store is not interrupted: it ends by itself after the first of these times. Creating a new group, to which
# all ranks come, has the longer time: the machine may be busy.
_STORE_TIMEOUT, _CREATION_TIMEOUT = timedelta(seconds=10), timedelta(seconds=120)

# Meshes and subgroups of the current default group. They end with it.
_cache: dict[Any, Any] = {}


def cached(key: Any, create: Callable[[], Any]) -> Any:
    """Call `create` once for each default group. All ranks must ask for the same keys in the same order."""
    if key not in _cache:
        _cache[key] = create()
    return _cache[key]


class Groups:
    """Creates and destroys the default process group of a rank.

    The ranks meet through a FileStore. A cut would also end a wait in a TCPStore, but connecting to a TCPStore queries
    a name server, which takes seconds on some machines.
    """

    def __init__(self, rank: int, world_size: int, backend: str, store_path: str, connections: Connections):
        self.rank = rank
        self.world_size = world_size
        self.backend = backend
        self._store_path = store_path
        self._connections = connections
        self._generation = 0

    def create(self) -> None:
        """Create the default group. The previous one, if any, has been destroyed."""
        self._generation += 1
        # Torch exports FileStore without listing it, which only strict mypy reports.
        store = dist.FileStore(  # type: ignore[attr-defined, unused-ignore]
            f"{self._store_path}.{self._generation}", self.world_size
        )
        store.set_timeout(_CREATION_TIMEOUT)
        dist.init_process_group(self.backend, store=store, rank=self.rank, world_size=self.world_size)
        store.set_timeout(_STORE_TIMEOUT)
        self._connections.release()  # all ranks came to the new group, so all of them have destroyed their old one

    def destroy(self) -> None:
        """Destroy all groups, whatever state they are in."""
        _cache.clear()
        if self._generation == 0:
            if dist.is_initialized():
                dist.destroy_process_group()  # the test's own group: no rank waits in it
            return
        self._connections.cut(include_busy=True)  # so that gloo has no peer to wait for while it is destroyed
        _torch.dtensor.forget_meshes()
        if dist.is_initialized():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dist.destroy_process_group()
