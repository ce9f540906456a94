"""The default process group that examples run in: made once for all of them, and anew after each that broke it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torch_testing_ext import _torch

from .connections import Connections

# A rank that waits for another one in a store is not woken; it gives up by itself after this. To meet for a new group,
# where all come, it has longer: the machine may be busy.
_STORE_PATIENCE, _MEETING_PATIENCE = timedelta(seconds=10), timedelta(seconds=120)

# What was made for the present group and goes with it: meshes, subgroups.
_kept: dict[Any, Any] = {}


def keep(key: Any, make: Callable[[], Any]) -> Any:
    """`make()`, once for each life of the default group. All ranks ask for the same things in the same order."""
    if key not in _kept:
        _kept[key] = make()
    return _kept[key]


class Groups:
    """The ranks meet in a file. A TCPStore would let go of a waiting rank when it is cut off, but to connect to one
    asks a name server, which takes seconds on some machines."""

    def __init__(self, rank: int, world_size: int, backend: str, meeting_place: str, wires: Connections):
        self.rank = rank
        self.world_size = world_size
        self.backend = backend
        self._meeting_place = meeting_place
        self._wires = wires
        self._life = 0

    def make(self) -> None:
        """The default group. What there was before has been ended."""
        self._life += 1
        store = dist.FileStore(f"{self._meeting_place}.{self._life}", self.world_size)
        store.set_timeout(_MEETING_PATIENCE)
        dist.init_process_group(self.backend, store=store, rank=self.rank, world_size=self.world_size)
        store.set_timeout(_STORE_PATIENCE)
        self._wires.let_go()  # having met the others here, this rank knows that they have ended their old groups

    def end(self) -> None:
        """Whatever state the groups are in."""
        _kept.clear()
        if self._life == 0:
            if dist.is_initialized():
                _torch.destroy_process_group()  # the test's own: nobody waits in it
            return
        self._wires.cut(busy_ones=True)  # and so gloo has no peer to wait for while it is destroyed
        _torch.forget_meshes()
        if dist.is_initialized():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dist.destroy_process_group()
