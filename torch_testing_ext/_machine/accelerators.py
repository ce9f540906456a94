"""The number and type of the accelerators, found without touching them from this process.

A process that asks CUDA or ROCm for its devices can no longer be forked into ranks that use them. So a forked child
asks, or a new interpreter where forking this process is not safe, and sends back the answer. Where no device can
exist, no process is started.
"""

import ctypes
import functools
import os
from contextlib import suppress
from typing import Any

import torch

from torch_testing_ext._machine import backend_names, device_sharing
from torch_testing_ext._machine.device_masks import all_masks
from torch_testing_ext._machine.device_needs import DeviceFacts, facts_from
from torch_testing_ext._process import fork_safety, system
from torch_testing_ext._torch.devices import accelerator_state, build_options, first_accelerator_use

from .asked_devices import answer_to
from .device_questions import (
    NO_DEVICE,
)

# A process has this open once ROCm is initialised in it, by whichever library.
_OPEN_WHEN_IN_USE = "/dev/kfd"
_driver_is_initialised = False
# Backends of extensions that PyTorch's own tests name.
_BACKENDS_OF_EXTENSIONS = ("hccl",)
device_may_exist = build_options.device_may_exist


def device_count() -> int:
    """Return the number of accelerators that this process may use."""
    return _devices()[1]


def most_ranks() -> int:
    """Return how many ranks of a test may use an accelerator: one each, or more where the user lets ranks share."""
    return device_count() * device_sharing.ranks_per_device()


def ranks_for(needed: int) -> int:
    """Return how many ranks a test has that wants one for each accelerator, and needs at least so many.

    Ranks share devices only where the test could not run otherwise.
    """
    return max(device_count(), min(needed, most_ranks()))


def need_accelerators(backend: str | None) -> bool:
    """Whether this backend, which may have parts for several types of devices, needs an accelerator for each rank."""
    return any(_is_of_accelerators(name) for name in backend_names.names_in(backend or ""))


def _is_of_accelerators(backend: str) -> bool:
    devices = torch.distributed.Backend.backend_capability.get(backend)
    if devices is None:
        # torch learns of one when it is first asked for, or from an extension that is not imported yet.
        return backend in (*backend_names.NCCL, *_BACKENDS_OF_EXTENSIONS)
    return "cpu" not in devices


def accelerator_type() -> str | None:
    """Return the type of the accelerators that this process may use (`"cuda"`, `"xpu"`, ...); None without any."""
    return _devices()[0]


def device_uuids() -> tuple[str, ...]:
    """Return what identifies each device, whatever its number is under the masks of this process; empty if unknown."""
    if not device_count():
        return ()
    return tuple(_answer("ask_uuids", _masks()))


def runtime() -> str | None:
    """Return the type of the accelerators, with "hip" for those of ROCm, which torch calls "cuda"; None without any."""
    kind = accelerator_type()
    is_rocm = kind == "cuda" and torch.version.hip is not None
    return "hip" if is_rocm else kind


def peers_have_access() -> bool:
    """Whether several CUDA devices of compute capability 8.0 or higher can all read each other's memory."""
    facts = device_facts() if device_count() > 1 else ()
    if not facts or facts[0].capability < (8, 0):
        return False
    others = len(facts) - 1
    return all(len(device.peers) == others for device in facts)


def cuda_properties() -> dict[str, Any]:
    """Return what tests ask about CUDA or ROCm and its first device; empty without one."""
    answer = _answer("ask_cuda_properties", _masks())
    return answer if isinstance(answer, dict) else {}


def why_no_device() -> str:
    """Return why torch can use none of the devices that there seem to be; "" where there is nothing to say."""
    if device_count() or not device_may_exist():
        return ""
    return str(_answer("ask_why_none", _masks()) or "")


def device_facts() -> tuple[DeviceFacts, ...]:
    """Return what is known of each device that this process may use, in its order; empty if nothing is."""
    answer = _answer("ask_facts", _masks()) if device_count() else ()
    return facts_from(answer)


def xpu_device_id() -> int:
    """Return the PCI number of the first XPU device's model; 0 without one."""
    if accelerator_type() != "xpu":
        return 0
    return int(_answer("ask_xpu_id", _masks()) or 0)


def _devices() -> tuple[str | None, int]:
    kind, count = _answer("ask_devices", _masks())
    return kind, count


def _masks() -> tuple[tuple[str, str], ...]:
    """The masks that are set. They decide which devices the runtime shows: an answer holds while they stay the same."""
    environ = os.environ
    return tuple((name, environ[name]) for name in sorted(all_masks(environ)) if name in environ)


@functools.cache
def _answer(question: str, masks: tuple[tuple[str, str], ...]) -> Any:
    """Ask once for each combination of masks."""
    return answer_to(question) if device_may_exist() else NO_DEVICE


def unsafe_to_fork() -> str | None:
    """Say why ranks that are forked from this process, or from the one it was forked from, could use no accelerator.

    None if they can.
    """
    if not device_may_exist():
        return None
    first_use = first_accelerator_use.first_use()
    if first_use is not None:
        return first_use
    if accelerator_state.accelerator_is_initialised() or accelerator_state.accelerator_is_in_bad_fork():
        return "an accelerator is initialised"
    if _cuda_driver_is_initialised():
        return "a library has initialised CUDA"
    if _OPEN_WHEN_IN_USE in system.opened("self"):
        return f"a library has initialised an accelerator ({_OPEN_WHEN_IN_USE} is open)"
    return None


def _cuda_driver_is_initialised() -> bool:
    """Whether a library has initialised CUDA's driver here, or in a process that this one was forked from since.

    The driver itself answers, if it is loaded. The files that are open do not tell: NVML opens the same ones.
    """
    global _driver_is_initialised
    with suppress(OSError):
        driver = ctypes.CDLL("libcuda.so.1", os.RTLD_NOLOAD)
        count = ctypes.c_int()
        error = driver.cuDeviceGetCount(ctypes.byref(count))
        _driver_is_initialised |= error == 0
    return _driver_is_initialised


def check_to_fork() -> str | None:
    """Make this process safe to fork if possible. Returns why its forks would lack accelerators or a thread, if so."""
    return unsafe_to_fork() or fork_safety.check_by_fork()


first_accelerator_use.count_elsewhere = device_count
