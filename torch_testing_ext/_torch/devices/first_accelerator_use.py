"""The line that first used an accelerator in this process, after which it is not safe to fork.

torch's Python functions, and C++ through them, start CUDA and XPU by a few functions of `torch._C`, and other
accelerators by `_lazy_init` of their module. Until the first of them is called, each is replaced by a function that
notes its caller.
"""

import functools
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from torch_testing_ext._torch.torch_frames import program_places

from .accelerator_state import accelerator_is_initialised, device_modules

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
    """Whether a mask names MIG instances. torch cannot count those by NVML, and would ask the driver."""
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
    place = next(program_places(frame), None)
    where = "" if place is None else f" in {_shortened(place[0])}:{place[1]}"
    _noted = _noted or f"{what}{where}"
    stop_noting()


def _shortened(file: str) -> str:
    try:
        relative = os.path.relpath(file)
    except (OSError, ValueError):  # the working directory is gone
        return file
    return file if relative.startswith("..") or file.startswith("<") else relative


note_first_use()
