"""The devices and the number of ranks of DTensor tests."""

from __future__ import annotations

from torch_testing_ext._machine import accelerators

DEFAULT_RANKS = 4


def num_devices() -> int:
    """Return the default number of ranks: one for each accelerator, at most 4; with fewer than 2, 4 on the CPU."""
    count = accelerators.device_count()
    return min(count, DEFAULT_RANKS) if count > 1 else DEFAULT_RANKS


def device_type() -> str:
    return accelerators.accelerator_type() or "cpu"


def device_type_for(world_size: int) -> str:
    return device_type() if accelerators.device_count() >= world_size else "cpu"
