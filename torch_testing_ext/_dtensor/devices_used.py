"""Which devices the ranks of DTensor tests use, and how many ranks there are."""

from __future__ import annotations

from torch_testing_ext._machine import accelerators

MOST_RANKS = 4  # of a test here, unless it asks for more


def num_devices() -> int:
    """One rank a device with 2 to 4 of them. With one or none, 4 ranks on CPU."""
    here = accelerators.device_count()
    return min(here, MOST_RANKS) if here > 1 else MOST_RANKS


def device_type() -> str:
    return accelerators.accelerator_type() or "cpu"


def device_type_for(world_size: int) -> str:
    return device_type() if accelerators.device_count() >= world_size else "cpu"
