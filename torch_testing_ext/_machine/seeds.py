"""The seed of every test, and a context that restores random state."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator

import torch

from . import accelerators

SEED = 1234


def set_rng_seed(seed: int | None = None) -> None:
    """Seed torch, `random`, and NumPy where it is imported; with SEED by default."""
    seed = SEED if seed is None else seed
    if accelerators.device_may_exist():
        torch.manual_seed(seed)
    else:
        # The CPU's generator alone: torch.manual_seed also queues seeds for devices, which costs each rank 1 ms.
        torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


def prepare_to_seed() -> None:
    """In a process that forks ranks: import numpy.random, which NumPy otherwise imports in each rank when it seeds."""
    if (numpy := sys.modules.get("numpy")) is not None:
        _ = numpy.random


@contextlib.contextmanager
def freeze_rng_state() -> Iterator[None]:
    """Restore torch's random state at the end: the CPU's, and that of the device in use, if any."""
    with torch.random.fork_rng(devices=_devices_in_use(), device_type=_device_type_in_use() or "cuda"):
        yield


def _device_type_in_use() -> str | None:
    """Only an initialised device has random state; this check must not initialise one."""
    for name in ("cuda", "xpu"):
        if getattr(torch, name).is_initialized():
            return name
    return None


def _devices_in_use() -> list[int]:
    kind = _device_type_in_use()
    return [getattr(torch, kind).current_device()] if kind else []
