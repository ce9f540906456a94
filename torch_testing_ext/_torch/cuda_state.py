"""CUDA: its first use, its allocator, the workspaces and versions of its libraries, and devices that ranks share."""

import functools
import importlib
import warnings
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
    from unittest import mock

    # It takes torch's functions as it is imported: before they are replaced.
    interface: Any = importlib.import_module("torch._dynamo.device_interface")
    answers: dict[str, Any] = {
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: capability[:2],
        "get_device_properties": lambda device=None: SimpleNamespace(
            gcnArchName=arch, major=capability[0], minor=capability[1]
        ),
    }
    with mock.patch.multiple(torch.cuda, **answers), mock.patch.dict(interface.caching_worker_device_properties):
        yield


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


@functools.cache
def gather_lists_one_by_one(key: str = "CUDA") -> Any:
    """Gather the tensors of a list one after the other, on devices with this dispatch key.

    gloo takes the addresses of a list for memory of the CPU, so CUDA tensors kill the process, and functional
    collectives and DTensors always gather lists (2.11 to 2.15).
    """
    library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]

    def gather(outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: Any, *_: Any) -> Any:
        unboxed = torch._C._distributed_c10d.ProcessGroup.unbox(group)
        work = unboxed._allgather_base(outputs[0], inputs[0])
        for output, mine in zip(outputs[1:], inputs[1:], strict=True):
            work.wait()
            work = unboxed._allgather_base(output, mine)
        return work.boxed()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it replaces torch's kernel
        library.impl("allgather_into_tensor_coalesced_", gather, key)
    return library


def peak_memory() -> dict[int, tuple[int, int]]:
    """Return the most bytes that this process has had on each CUDA device: in tensors, and held by the allocator.

    Empty if it has not used CUDA. Call it in the process itself: it initialises nothing.
    """
    cuda: Any = torch.cuda
    found = {number: (cuda.max_memory_allocated(number), cuda.max_memory_reserved(number)) for number in _used()}
    return {number: peak for number, peak in found.items() if any(peak)}


def forget_peak_memory() -> None:
    """Let `peak_memory` start again."""
    cuda: Any = torch.cuda
    for number in _used():
        cuda.reset_peak_memory_stats(number)


def _used() -> range:
    """The devices, if this process has used CUDA, and may."""
    cuda: Any = torch.cuda
    return range(cuda.device_count() if cuda.is_initialized() and not cuda._is_in_bad_fork() else 0)
