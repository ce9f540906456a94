"""A rank that is a process: as its parent sees it, and what it does first."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

import torch
import torch.distributed as dist

from torch_testing_ext import _torch, launch
from torch_testing_ext._machine.seeds import set_rng_seed
from torch_testing_ext._process import system


class RankProcess:
    """One rank as the parent sees it, in the manner of multiprocessing.Process."""

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
        """Wait for its end."""
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
    """In a new rank: what it must not have, or not alike, from the process that it comes of."""
    set_rng_seed()
    threads = max(1, system.cores() // world_size)
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    if "TORCH_DISTRIBUTED_DEBUG" in os.environ:
        dist.set_debug_level_from_env()  # read once at import otherwise, before the fork
    if patient:
        _torch.wait_without_end()


def leave_process_group(fast: bool) -> None:
    """At a rank's end. `fast`: gloo's groups may go with the process."""
    if not dist.is_initialized() or (fast and _torch.only_gloo()):
        return
    with suppress(AssertionError, ValueError):
        dist.destroy_process_group()
