"""An accelerator of which torch knows everything but how to compute: devices, masks, properties, a backend.

It is a module of Python: `torch.testacc`, a device of torch's PrivateUse1, so nothing has to be built. No tensor can be
on it. TESTACC_COUNT=4 gives a process four devices; TESTACC_VISIBLE_DEVICES masks them, until their first use.

With this folder in PYTHONPATH, each process that imports torch has it, by torch's entry point for extensions. A test
can call `register` itself, in a process of its own: torch forgets no device.
"""

import os
import types
from typing import Any

import torch

KIND = "testacc"
BACKEND = "testccl"
COUNT = "TESTACC_COUNT"
MASK = "TESTACC_VISIBLE_DEVICES"
MEMORY = 16 << 30

# The process that has used the devices first; a child of it cannot use them.
_user: int | None = None
_counted = 0


def autoload() -> None:
    """The entry point that `import torch` calls. It reads no variable, so forks may have any number."""
    register()


def register() -> None:
    """Give torch this accelerator in this process, and in those that it forks."""
    if hasattr(torch, KIND):
        return
    torch.utils.rename_privateuse1_backend(KIND)
    c: Any = torch._C
    c._acc.register_python_privateuseone_hook(_hooks(c))
    c._acc.register_python_privateuseone_device_guard(_guard(c))
    torch._register_device_module(KIND, _module())
    torch.distributed.Backend.register_backend(BACKEND, _make_group, devices=[KIND])


def _hooks(c: Any) -> Any:
    class Hooks(c._acc.PrivateUse1Hooks):  # type: ignore[misc]
        def is_available(self) -> bool:
            return device_count() > 0

        def is_built(self) -> bool:
            return True

        def has_primary_context(self, device: int) -> bool:
            return is_initialized()

    return Hooks()


def _guard(c: Any) -> Any:
    class Guard(c._acc.DeviceGuard):  # type: ignore[misc]
        def type_(self) -> Any:
            return c._autograd.DeviceType.PrivateUse1

    return Guard()


def _module() -> types.ModuleType:
    """The module that torch has under the name of the device: a copy, whose functions torch may replace."""
    module = types.ModuleType(f"torch.{KIND}")
    for function in (
        *(device_count, is_available, init, is_initialized, current_device, get_device_properties, mem_get_info),
        *(max_memory_allocated, max_memory_reserved, reset_peak_memory_stats, manual_seed_all),
        _is_in_bad_fork,
    ):
        setattr(module, function.__name__, function)
    vars(module)["_lazy_init"] = init
    return module


def _make_group(store: Any, rank: int, size: int, timeout: Any) -> Any:
    """Make a group that can be asked, but has nothing to send: no tensor can be on these devices."""
    return torch.distributed.ProcessGroupGloo(store, rank, size, timeout)


# -- the functions of torch.testacc


def device_count() -> int:
    return _counted if _user is not None else len(_visible())


def _visible() -> list[str]:
    devices = [str(number) for number in range(int(os.environ.get(COUNT) or 0))]
    mask = os.environ.get(MASK)
    if mask is None:
        return devices
    visible: list[str] = []
    for entry in mask.split(","):
        # As CUDA reads its mask: the first unknown entry ends it.
        if entry not in devices or entry in visible:
            break
        visible.append(entry)
    return visible


def is_available() -> bool:
    return device_count() > 0


def init() -> None:
    """Use the devices: from now on a mask has no effect, and a forked child cannot use them."""
    global _user, _counted
    if _is_in_bad_fork():
        raise RuntimeError(f"Cannot re-initialize {KIND} in forked subprocess.")
    if _user is None:
        _counted, _user = device_count(), os.getpid()


def is_initialized() -> bool:
    return _user == os.getpid()


def _is_in_bad_fork() -> bool:
    return _user not in (None, os.getpid())


def current_device() -> int:
    return 0


def get_device_properties(device: int = 0) -> types.SimpleNamespace:
    name = _visible()[device]
    return types.SimpleNamespace(name="Test accelerator", total_memory=MEMORY, uuid=f"testacc-{name}")


def mem_get_info(device: int = 0) -> tuple[int, int]:
    return MEMORY, MEMORY


def max_memory_allocated(device: int = 0) -> int:
    return 0


def max_memory_reserved(device: int = 0) -> int:
    return 0


def reset_peak_memory_stats(device: int = 0) -> None:
    pass


def manual_seed_all(seed: int) -> None:
    pass
