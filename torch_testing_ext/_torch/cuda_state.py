"""CUDA: its first use, its allocator, the workspaces and versions of its libraries, and devices that ranks share."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch


@contextmanager
def describing_device(capability: tuple[int, ...], arch: str) -> Iterator[None]:
    """While it lasts, let torch ask about the first device of CUDA or ROCm without initialising it.

    `torch._dynamo.device_interface.caching_worker_device_properties`: 2.11 to 2.15.
    """
    # It takes torch's functions as it is imported: before they are replaced.
    interface: Any = importlib.import_module("torch._dynamo.device_interface")
    cuda: Any = torch.cuda
    cached = dict(interface.caching_worker_device_properties)
    answers = {
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: capability[:2],
        "get_device_properties": lambda device=None: SimpleNamespace(
            gcnArchName=arch, major=capability[0], minor=capability[1]
        ),
    }
    before = {name: getattr(cuda, name) for name in answers}
    for name, answer in answers.items():
        setattr(cuda, name, answer)
    try:
        yield
    finally:
        for name, original in before.items():
            setattr(cuda, name, original)
        interface.caching_worker_device_properties.clear()
        interface.caching_worker_device_properties.update(cached)


def caching_allocator_is_enabled() -> bool:
    """Does CUDA's allocator cache memory? `_cuda_cudaCachingAllocator_is_enabled`: 2.13 to 2.15."""
    ask = getattr(torch._C, "_cuda_cudaCachingAllocator_is_enabled", None)
    return True if ask is None else bool(ask())


def forget_blas_workspaces() -> None:
    """Free the workspaces of cuBLAS, and give them their default size. `_cuda_clearCublasWorkspaces`: 2.11 to 2.15.

    `_cuda_resetCublasWorkspaceSize`, `_cuda_resetCublasLtWorkspaceSize`: 2.13 to 2.15.
    """
    for name in ("_cuda_resetCublasWorkspaceSize", "_cuda_resetCublasLtWorkspaceSize", "_cuda_clearCublasWorkspaces"):
        if (call := getattr(torch._C, name, None)) is not None:
            call()


def supports_green_contexts() -> bool:
    """Do the driver and cuda-python support green contexts?

    `torch.cuda.green_contexts._ensure_supported`: 2.11 to 2.15.
    """
    return _green_contexts_have("_ensure_supported")


def supports_workqueues() -> bool:
    """Do they support work queues of green contexts? `_ensure_workqueue_supported`: 2.12 to 2.15."""
    return supports_green_contexts() and _green_contexts_have("_ensure_workqueue_supported")


def _green_contexts_have(check: str) -> bool:
    try:
        getattr(importlib.import_module("torch.cuda.green_contexts"), check)()
    except (ImportError, AttributeError, RuntimeError):
        return False
    return True


def hipblaslt_version() -> int:
    """The version of hipBLASLt, as one number; 0 without it. `torch._C._cuda_getHipblasltVersion`: 2.11 to 2.15."""
    ask = getattr(torch._C, "_cuda_getHipblasltVersion", None)
    try:
        return int(ask() or 0) if ask is not None else 0
    except RuntimeError:
        return 0


def has_cupti() -> bool:
    """Can CUPTI's bindings and torch's part of them be imported? `torch.profiler._cuspy`: 2.14 to 2.15."""
    try:
        for name in ("cupti", "torch.profiler._cuspy._cupti_stubs"):
            importlib.import_module(name)
    except Exception:  # CUPTI's bindings fail in many ways without their library
        return False
    return True


def cupti_version() -> int:
    """The version of CUPTI, as one number; 0 if it does not say. `torch.profiler._cuspy.cupti_python`: 2.14 to 2.15."""
    try:
        library: Any = importlib.import_module("torch.profiler._cuspy.cupti_python")
        return int(library.pylibcupti().get_version())
    except Exception:
        return 0


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
