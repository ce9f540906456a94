"""A rank that is a process: its handle in the parent, and the first and last steps in the rank."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from torch_testing_ext import _torch, launch
from torch_testing_ext._machine.seeds import set_rng_seed
from torch_testing_ext._process import system

c10d: Any = dist  # its type stubs lack what comes from C++


class RankProcess:
    """The parent's handle of one rank, with the interface of multiprocessing.Process."""

    def __init__(self, run: launch.Run, rank: int):
        self._run = run
        self.rank = rank
        self.name = f"process {rank}"

    @property
    def pid(self) -> int:
        return self._run.pids[self.rank]

    @property
    def exitcode(self) -> int | None:
        self.join(timeout=0)
        ended = self._run.exits.get(self.rank)
        return ended.code if ended else None

    def is_alive(self) -> bool:
        return self.exitcode is None and self._run.lost is None

    def join(self, timeout: float | None = None) -> None:
        """Wait for the rank to end."""
        until = None if timeout is None else launch.now() + timeout
        while self.rank in self._run.alive and self._run.wait_for_event(until):
            pass

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        self._run.signal(number, self.rank)


def prepare_rank(world_size: int, patient: bool) -> None:
    """In a new rank: reset the state that it must not inherit from its fork parent."""
    set_rng_seed()
    threads = max(1, system.cores() // world_size)
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    if "TORCH_DISTRIBUTED_DEBUG" in os.environ:
        c10d.set_debug_level_from_env()  # torch reads it only at import, which was before the fork
    if patient:
        _torch.wait_without_end()


def leave_process_group(fast: bool) -> None:
    """Destroy the process groups at a rank's end; with `fast`, leave gloo's groups to the end of the process."""
    if not dist.is_initialized() or (fast and _torch.only_gloo()):
        return
    with suppress(AssertionError, ValueError):
        dist.destroy_process_group()
