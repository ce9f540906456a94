"""The number and type of the accelerators, found without touching them from this process.

A process that asks CUDA or ROCm for its devices can no longer be forked into ranks that use them. So a forked child
asks, or a new interpreter where forking this process is not safe, and sends back the answer. Where no device can
exist, no process is started.
"""

import ctypes
import functools
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from torch_testing_ext._machine import backend_names, device_sharing
from torch_testing_ext._machine.device_masks import all_masks
from torch_testing_ext._machine.device_needs import DeviceFacts, facts_from
from torch_testing_ext._process import fork_safety, system
from torch_testing_ext._process.questions import By, NoAnswer, Silence, ask_elsewhere
from torch_testing_ext._torch.devices import accelerator_state, build_options, cuda_state, first_accelerator_use

# A process has this open once ROCm is initialised in it, by whichever library.
_OPEN_WHEN_IN_USE = "/dev/kfd"
_driver_is_initialised = False
# Backends of extensions that PyTorch's own tests name.
_BACKENDS_OF_EXTENSIONS = ("hccl",)
NO_DEVICE: tuple[str | None, int] = (None, 0)
device_may_exist = build_options.device_may_exist
# A driver that initialises many devices takes seconds; a child that needs longer than this is stuck.
FORK_TIMEOUT = 60.0
# A new interpreter imports torch before it asks.
INTERPRETER_TIMEOUT = 120.0
# The answer of a forked child whose parent has initialised the driver.
_TOO_LATE = "the driver was initialised before the fork"
_DRIVER = "the driver of the accelerators"


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


# -- the questions: after asking one, a process can no longer fork ranks that use devices


def ask_devices() -> tuple[str | None, int]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return NO_DEVICE
    count = cuda_state.usable_devices(accelerator.type)
    return (accelerator.type, count) if count else NO_DEVICE


def ask_why_none() -> str:
    """Ask why torch, which is built for CUDA or ROCm, can use none of the devices of this machine."""
    is_built = torch.version.cuda is not None or torch.version.hip is not None
    return cuda_state.why_cuda_is_unusable() if is_built else ""


def ask_uuids() -> list[str]:
    kind, count = ask_devices()
    if kind is None:
        return []
    try:
        properties_of = torch.get_device_module(kind).get_device_properties
        return [str(properties_of(number).uuid) for number in range(count)]
    except Exception:
        # Not all kinds of devices have one.
        return []


def ask_cuda_properties() -> dict[str, Any]:
    """Ask for what `cuda_properties` returns."""
    kind, count = ask_devices()
    if kind != "cuda":
        return {}
    # Untyped in torch.
    backends: Any = torch.backends
    cuda: Any = torch.cuda
    devices = range(count)
    archs = [getattr(cuda.get_device_properties(device), "gcnArchName", "") for device in devices]
    # has_magma is right once CUDA is initialised.
    tensor = torch.ones((), device="cuda")
    return {
        "capability": cuda.get_device_capability(),
        "capabilities": [cuda.get_device_capability(device) for device in devices],
        "arch": archs[0],
        "archs": archs,
        "accepts_cudnn": backends.cudnn.is_acceptable(tensor),
        # Checks the capability of each device.
        "cudnn_version": backends.cudnn.version() or 0,
        "has_magma": bool(cuda.has_magma),
        "has_tf32": bool(cuda.is_tf32_supported()),
        "multicast": _has_multicast(),
    }


def ask_facts() -> list[dict[str, Any]]:
    """Ask for the facts about each device, as far as its module in torch knows them."""
    kind, count = ask_devices()
    if kind is None:
        return []
    device_module = torch.get_device_module(kind)
    return [_facts_of(device_module, number, count) for number in range(count)]


def _facts_of(device_module: Any, number: int, count: int) -> dict[str, Any]:
    """The facts about one of `count` devices. CUDA has all of them; others lack some, which are then unknown."""
    properties = _optional(lambda: device_module.get_device_properties(number))
    memory = getattr(properties, "total_memory", None) or _optional(lambda: device_module.mem_get_info(number)[1])
    capability = [getattr(properties, name, None) for name in ("major", "minor")]
    others = [other for other in range(count) if other != number]
    can_access: Any = getattr(device_module, "can_device_access_peer", lambda device, peer: False)
    return {
        "name": str(getattr(properties, "name", "")),
        "memory": int(memory or 0),
        "capability": capability if all(isinstance(part, int) for part in capability) else [0, 0],
        "peers": [other for other in others if _optional(functools.partial(can_access, number, other))],
    }


def _optional(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except Exception:
        # Not every device module has this function, not every driver an answer.
        return None


def _has_multicast() -> bool:
    try:
        return build_options.has_multicast()
    except Exception:
        # This torch or this driver has no answer.
        return False


def ask_xpu_id() -> int:
    return int(torch.xpu.get_device_capability()["device_id"])


_ASKING = (ask_devices, ask_why_none, ask_uuids, ask_cuda_properties, ask_facts, ask_xpu_id)
QUESTIONS: dict[str, Callable[[], Any]] = {ask.__name__: ask for ask in _ASKING}


# -- ways to ask them


def answer_to(question: str) -> Any:
    """Ask in the way that leaves this process as it is. Raises NoAnswer."""
    if accelerator_state.accelerator_is_initialised():
        return _ask(question)
    if not fork_safety.other_threads() and not accelerator_state.accelerator_is_in_bad_fork():
        try:
            answer = ask_elsewhere(_ask_unless_too_late, question, by=By.FORK, who=_DRIVER, timeout=FORK_TIMEOUT)
        except NoAnswer as error:
            # A fork may fail where a new process does not.
            if error.silence is Silence.LATE:
                raise
        else:
            # This process has initialised the driver before: asking here does no more harm.
            return _ask(question) if answer == _TOO_LATE else answer
    return ask_elsewhere(_ask, question, by=By.INTERPRETER, who=_DRIVER, timeout=INTERPRETER_TIMEOUT)


def _ask_unless_too_late(question: str) -> Any:
    """In a forked child: ask, unless its parent had initialised the driver, which no child of it can use."""
    return _TOO_LATE if accelerator_state.accelerator_is_in_bad_fork() else _ask(question)


def _ask(question: str) -> Any:
    """Ask in this process, where nothing is to be noted any more."""
    first_accelerator_use.stop_noting()
    ask = QUESTIONS[question]
    return ask()


first_accelerator_use.count_elsewhere = device_count
