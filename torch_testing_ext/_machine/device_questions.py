"""Questions on devices. After asking one, a process can no longer fork ranks that use devices."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from torch_testing_ext._torch.devices import build_options, cuda_state

NO_DEVICE: tuple[str | None, int] = (None, 0)


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
