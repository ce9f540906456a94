"""Functions of torch for ranks that share CUDA devices, and the memory that they have had."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def nccl_version() -> tuple[int, ...]:
    """Return the version of NCCL, without asking a device; () without it. `torch.cuda.nccl.version`: 2.11 to 2.15."""
    if not torch.distributed.is_nccl_available():
        return ()
    nccl: Any = torch.cuda.nccl  # untyped in torch
    return tuple(nccl.version()[:3])


def when_cuda_is_first_used(call: Callable[[], None]) -> None:
    """Call this when this process initialises CUDA, or now if it has. `torch.cuda._lazy_call`: 2.11 to 2.15."""
    cuda: Any = torch.cuda
    cuda._lazy_call(call)


def fold_device_numbers(count: int) -> None:
    """Let this process select CUDA device N modulo `count`: a rank may name a device by its own number.

    For `torch.cuda.set_device` and `torch.accelerator.set_device_index`: torch's DeviceMesh, too, selects a device by
    the number of the rank. Tensors on a device with a larger number remain an error of CUDA.
    """
    cuda: Any = torch.cuda
    accelerator: Any = torch.accelerator
    if getattr(cuda.set_device, "folds", False):
        return  # a process that is a rank in several tests
    cuda.set_device = _folding(cuda.set_device, count)
    accelerator.set_device_index = _folding(accelerator.set_device_index, count)


def _folding(select: Any, count: int) -> Any:
    @functools.wraps(select)
    def selecting(device: Any, *args: Any, **kwargs: Any) -> Any:
        found = torch.device(device) if isinstance(device, str) else device
        index = found.index if isinstance(found, torch.device) else found
        return select(index % count if isinstance(index, int) and index >= 0 else device, *args, **kwargs)

    selecting.folds = True  # type: ignore[attr-defined]
    return selecting


def peak_memory() -> dict[int, tuple[int, int]]:
    """Return the most bytes that this process has had on each CUDA device: in tensors, and held by the allocator.

    Empty if it has not used CUDA. Call it in the process itself: it initialises nothing.
    """
    cuda: Any = torch.cuda
    if not cuda.is_initialized() or cuda._is_in_bad_fork():
        return {}
    found = {number: (cuda.max_memory_allocated(number), cuda.max_memory_reserved(number)) for number in _used()}
    return {number: peak for number, peak in found.items() if any(peak)}


def forget_peak_memory() -> None:
    """Let `peak_memory` start again."""
    cuda: Any = torch.cuda
    if cuda.is_initialized() and not cuda._is_in_bad_fork():
        for number in _used():
            cuda.reset_peak_memory_stats(number)


def _used() -> range:
    return range(torch.cuda.device_count())
