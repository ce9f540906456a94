"""The devices that torch was built for, the state of CUDA, and the line that first used an accelerator."""

import functools
import importlib
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import torch

# --------------------------------------------------------------------------------------------------------------------
# Options with which torch was built, and its accelerators: which there are, and whether this process uses them.


def onednn_uses_arm_compute_library() -> bool:
    """Does oneDNN use the Arm Compute Library? `torch.ops.mkldnn._is_mkldnn_acl_supported`: 2.11 to 2.15."""
    return bool(torch.ops.mkldnn._is_mkldnn_acl_supported())


def is_internal_build() -> bool:
    """Was torch built in Meta's own repository? `torch._utils_internal.IS_FBSOURCE`, set only there."""
    return bool(getattr(torch._utils_internal, "IS_FBSOURCE", False))


def extension_device_type() -> str:
    """Return the device type of an out-of-tree backend. `torch._C._get_privateuse1_backend_name`: 2.11 to 2.15."""
    return torch._C._get_privateuse1_backend_name()


def register_device_module(kind: str, module: Any) -> None:
    """Make a module that of an extension's devices, `torch.<kind>`. `torch._register_device_module`: 2.11 to 2.15."""
    register: Any = torch._register_device_module
    register(kind, module)


def has_lapack() -> bool:
    """Was torch built with LAPACK? `torch._C.has_lapack`: 2.11 to 2.15."""
    return bool(torch._C.has_lapack)


def cpu_capabilities() -> dict[str, object]:
    """Return what the CPU can do, such as "avx512_vnni". `torch.cpu.get_capabilities`: 2.11 to 2.15."""
    cpu: Any = torch.cpu  # its stubs differ between versions
    return dict(cpu.get_capabilities())


def cpu_kernels() -> str:
    """Return the instructions for which kernels are chosen, such as "AVX512". `_get_cpu_capability`: 2.11 to 2.15."""
    return str(torch._C._get_cpu_capability())


def device_modules() -> dict[str, Any]:
    """Return torch's modules of the types of accelerators that a process can be forked with, as far as there are any.

    MTIA's and those of extensions, such as `torch.hpu`, have the functions of `torch.cuda` that we ask for, or lack
    some of them.
    """
    # torch has its module of MTIA everywhere.
    built = ["mtia"] if torch._C._mtia_isBuilt() else []
    modules = {name: getattr(torch, name, None) for name in ("cuda", "xpu", *built, "hpu", extension_device_type())}
    return {name: module for name, module in modules.items() if module is not None}


def initialised_type() -> str | None:
    """Return the type of the accelerators that this process uses already; None if it uses none.

    `torch.cuda.is_initialized` and those of other types: 2.11 to 2.15.
    """
    return next((name for name, module in device_modules().items() if _says(module, "is_initialized")), None)


def accelerator_is_initialised() -> bool:
    """Does this process have an accelerator context already?"""
    return initialised_type() is not None


def accelerator_is_in_bad_fork() -> bool:
    """In a forked child: is an accelerator unusable, as the parent initialised it? `_is_in_bad_fork`: 2.11 to 2.15."""
    return any(_says(module, "_is_in_bad_fork") for module in device_modules().values())


def _says(module: Any, question: str) -> bool:
    """The answer of a device's module; no, where it cannot be asked."""
    ask = getattr(module, question, None)
    return ask is not None and bool(ask())


def other_accelerator_is_built() -> bool:
    """Is torch built, or extended, for an accelerator other than CUDA and ROCm?

    `torch.xpu._is_compiled`, `torch._C._mtia_isBuilt`, `_get_privateuse1_backend_name`: 2.11 to 2.15.
    """
    return (
        torch.xpu._is_compiled()
        or torch._C._mtia_isBuilt()
        or torch.backends.mps.is_built()
        or hasattr(torch, "hpu")
        or hasattr(torch, extension_device_type())
    )


def device_may_exist(dev: Path = Path("/dev"), environ: Mapping[str, str] = os.environ) -> bool:
    """Could this torch find a device on this machine? False only where that is certain."""
    if torch.version.cuda is not None or torch.version.hip is not None:
        is_hidden = environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        has_node = any(dev.glob("nvidia[0-9]*")) or any((dev / name).exists() for name in ("nvidiactl", "dxg", "kfd"))
        if has_node and not is_hidden:
            return True
    return other_accelerator_is_built()


def has_multicast() -> bool:
    """Does the first CUDA device support multicast? `_SymmetricMemory.has_multicast_support`: 2.11 to 2.15."""
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory.has_multicast_support(DeviceType.CUDA, 0)


# --------------------------------------------------------------------------------------------------------------------
# CUDA: its first use, its allocator, the workspaces and versions of its libraries, and devices that ranks share.


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
    module: Any = torch.get_device_module(kind)
    accelerator: Any = torch.accelerator
    if getattr(accelerator.set_device_index, "folds", False):
        return  # a process that is a rank in several tests
    for owner, name in ((module, "set_device"), (accelerator, "set_device_index")):
        if hasattr(owner, name):
            setattr(owner, name, _folding(getattr(owner, name), count))
    # `device` and `device_index` are classes, since torch 2.9 both.
    contexts = (getattr(module, "device", None), getattr(accelerator, "device_index", None))
    for cls, name in (*((context, "__init__") for context in contexts if context), (torch.Tensor, kind)):
        if hasattr(cls, name):
            setattr(cls, name, _folding(getattr(cls, name), count, place=1))


def _folding(select: Any, count: int, place: int = 0) -> Any:
    """The function, with another device. `place`: of the device among its arguments."""

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


# --------------------------------------------------------------------------------------------------------------------
# Finds the line that first used an accelerator in this process, after which it is not safe to fork.
#
# torch's Python functions, and C++ through them, start CUDA and XPU by a few functions of `torch._C`, and other
# accelerators by `_lazy_init` of their module. Until the first of them is called, each is replaced by a function that
# notes its caller.

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
# `_cuda_init`, `_cuda_getDeviceCount`, `_xpu_init`, `_xpu_getDeviceCount`: 2.11 to 2.15, where torch is built for them.
_CUDA = "ROCm" if torch.version.hip is not None else "CUDA"
_COUNT = "_cuda_getDeviceCount"
_MASK = "CUDA_VISIBLE_DEVICES"
_ENTRANCES = {
    "_cuda_init": f"{_CUDA} is initialised",
    _COUNT: f"the driver of {_CUDA} is asked for its devices",
    "_xpu_init": "XPU is initialised",
    "_xpu_getDeviceCount": "the driver of XPU is asked for its devices",
}

# The second is for people; it may be the first by another name.
_OF_OTHERS = ("_lazy_init", "init")

# Counts devices in another process; `_machine.accelerators` sets it.
count_elsewhere: Callable[[], int] | None = None

_noted: str | None = None
# What was replaced: the module, its attribute, and what that was.
_originals: list[tuple[Any, str, Any]] = []


def note_first_use() -> None:
    """Note the first line that uses an accelerator, if none has yet."""
    global _noted
    if _originals or _noted is not None:
        return
    if accelerator_is_initialised():
        _noted = "an accelerator was initialised before torch_testing_ext was imported"
        return
    for name, what in _ENTRANCES.items():
        _watch(torch._C, name, what)
    for kind, module in device_modules().items():
        _watch_module(kind, module)
    # An extension may be imported later. `torch._register_device_module`: 2.11 to 2.15.
    register: Any = torch._register_device_module

    @functools.wraps(register)
    def registering(device_type: str, module: Any) -> None:
        register(device_type, module)
        _watch_module(device_type, module)

    _replace(torch, "_register_device_module", registering)


def _watch_module(kind: str, module: Any) -> None:
    if kind not in ("cuda", "xpu"):
        for name in _OF_OTHERS:
            _watch(module, name, f"{kind} is initialised")


def _watch(module: Any, name: str, what: str) -> None:
    """Have the first call of a function noted, if the module has it."""
    original = getattr(module, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def entrance(*args: Any, **kwargs: Any) -> Any:
        if name == _COUNT and _is_mig(os.environ.get(_MASK, "")) and count_elsewhere is not None:
            return count_elsewhere()
        _note(what, sys._getframe(1))
        return original(*args, **kwargs)

    _replace(module, name, entrance)


def _is_mig(mask: str) -> bool:
    """Does a mask name MIG instances? torch cannot count those by NVML, and would ask the driver."""
    return mask.startswith("MIG-")


def _replace(module: Any, name: str, new: Any) -> None:
    _originals.append((module, name, getattr(module, name)))
    setattr(module, name, new)


def stop_noting() -> None:
    """Put the functions of torch back. Ranks have nothing to note: nobody forks them."""
    while _originals:
        module, name, original = _originals.pop()
        setattr(module, name, original)


def first_use() -> str | None:
    """The first use of an accelerator, as "CUDA is initialised in test_x.py:12"; None if nothing is known to have."""
    return _noted


def _note(what: str, frame: FrameType) -> None:
    global _noted
    _noted = _noted or f"{what}{_place(frame)}"
    stop_noting()


def _place(innermost: FrameType) -> str:
    """The innermost line that is neither torch's nor ours nor the import system's."""
    for frame, line in traceback.walk_stack(innermost):
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH, _PACKAGE, "<frozen ")):
            return f" in {_shortened(file)}:{line}"
    return ""


def _shortened(file: str) -> str:
    try:
        relative = os.path.relpath(file)
    except (OSError, ValueError):  # the working directory is gone
        return file
    return file if relative.startswith("..") or file.startswith("<") else relative


note_first_use()
