"""The memory of fake accelerators."""

from typing import Any

from .fake_devices import index_of
from .fake_library import accelerator


def memory_stats(device: Any = None) -> dict[str, Any]:
    """Return the statistics of this process's memory on a device."""
    return dict(accelerator.memory_stats(index_of(device)))


def memory_allocated(device: Any = None) -> int:
    """Return the bytes that the tensors of this process have on a device."""
    return int(memory_stats(device).get("allocated_bytes.all.current", 0))


def max_memory_allocated(device: Any = None) -> int:
    """Return the most bytes that the tensors of this process have had on a device."""
    return int(memory_stats(device).get("allocated_bytes.all.peak", 0))


# Nothing is kept for later.
memory_reserved = memory_allocated
max_memory_reserved = max_memory_allocated


def reset_peak_memory_stats(device: Any = None) -> None:
    """Let the peak start again."""
    accelerator.reset_peak_memory_stats(index_of(device))


def empty_cache() -> None:
    """Do nothing: nothing is kept."""
