"""CUDA: its first use, its allocator, the workspaces and versions of its libraries, and devices that ranks share."""

import functools
import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from torch_testing_ext._torch import replacing

from .accelerator_state import accelerator_is_in_bad_fork, device_modules, initialised_type


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
    told = replacing.replaced("questions about a device", lambda name, _: answers[name])
    with told, mock.patch.dict(interface.caching_worker_device_properties):
        yield


def keep_busy(device: str, cycles: int) -> None:
    """Keep the current stream of a device busy for about so many cycles. `torch.cuda._sleep`: 2.11 to 2.15."""
    torch.get_device_module(device)._sleep(cycles)


def caching_allocator_is_enabled() -> bool:
    """Whether CUDA's allocator caches memory. `_cuda_cudaCachingAllocator_is_enabled`: 2.13 to 2.15."""
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


def usable_devices(kind: str) -> int:
    """Return how many accelerators this process can use, which asks the driver. `_cuda_getDeviceCount`: 2.11 to 2.15.

    `torch.cuda.device_count` counts by NVML, also devices that CUDA cannot use: those of a driver that is too old for
    this torch, and all but one of those in MIG mode.
    """
    if kind != "cuda":
        return torch.accelerator.device_count()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # why there is none, which `why_cuda_is_unusable` tells
        return int(torch._C._cuda_getDeviceCount())


def why_cuda_is_unusable() -> str:
    """Try to use CUDA or ROCm, and return torch's first sentence about why that fails; "" if it does not."""
    cuda: Any = torch.cuda
    try:
        cuda.init()
    except Exception as error:
        return str(error).partition("\n")[0].partition(". ")[0].rstrip(".") or type(error).__name__
    return ""


def when_cuda_is_first_used(call: Callable[[], None]) -> None:
    """Call this when this process initialises CUDA, or now if it has. `torch.cuda._lazy_call`: 2.11 to 2.15."""
    cuda: Any = torch.cuda
    cuda._lazy_call(call)


def fold_device_numbers(count: int, kind: str) -> None:
    """Let this process select the accelerator N modulo `count`: a rank may name a device by its own number.

    For `torch.cuda.set_device` and `torch.cuda.device`, or those of another type, `torch.accelerator.set_device_index`,
    which torch's DeviceMesh calls with the number of the rank, and `device_index`, and `cuda()` of tensors and modules.
    A `torch.device` with a larger number remains an error of torch where a tensor is made on it.
    """
    if getattr(torch.accelerator.set_device_index, "folds", False):
        return  # a process that is a rank in several tests
    replacing.replace_for_good("numbers of devices", lambda name, select: _folding(name, select, count), [kind])


def _folding(name: str, select: Any, count: int) -> Any:
    """The function, with another device, which comes after `self` in the methods of contexts and tensors."""
    place = 0 if name.startswith("set_") else 1

    @functools.wraps(select)
    def selecting(*args: Any, **kwargs: Any) -> Any:
        before, devices, after = args[:place], args[place : place + 1], args[place + 1 :]
        kwargs = {key: _folded(value, count) if key == "device" else value for key, value in kwargs.items()}
        return select(*before, *(_folded(device, count) for device in devices), *after, **kwargs)

    selecting.folds = True  # type: ignore[attr-defined]
    return selecting


def _folded(device: Any, count: int) -> Any:
    found = torch.device(device) if isinstance(device, str) else device
    index = found.index if isinstance(found, torch.device) else found
    return index % count if isinstance(index, int) and index >= 0 else device


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
    """Return the most bytes that this process has had on each accelerator: in tensors, and held by the allocator.

    Empty if it has used none, or one that does not count them. Call it in the process itself: it initialises nothing.
    """
    peaks = {}
    for module, number in _used():
        peaks[number] = (int(module.max_memory_allocated(number)), int(module.max_memory_reserved(number)))
    return {number: peak for number, peak in peaks.items() if any(peak)}


def forget_peak_memory() -> None:
    """Let `peak_memory` start again."""
    for module, number in _used():
        module.reset_peak_memory_stats(number)


_OF_MEMORY = ("max_memory_allocated", "max_memory_reserved", "reset_peak_memory_stats")


def _used() -> list[tuple[Any, int]]:
    """The accelerators, each as its module and its number, if this process has used them, and may."""
    kind = initialised_type()
    if kind is None or accelerator_is_in_bad_fork():
        return []
    module = device_modules()[kind]
    counts = all(hasattr(module, name) for name in _OF_MEMORY)
    return [(module, number) for number in range(module.device_count() if counts else 0)]
