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

from torch_testing_ext._torch.replacing import Replacement
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
# Counts devices in another process; `_machine.accelerators` sets it.
count_elsewhere: Callable[[], int] | None = None
_noted: str | None = None
_replaced: list[Replacement] = []  # until the first use


def note_first_use() -> None:
    """Note the first line that uses an accelerator, if none has yet."""
    global _noted
    if _replaced or _noted is not None:
        return
    if accelerator_is_initialised():
        _noted = "an accelerator was initialised before torch_testing_ext was imported"
        return
    _replaced.append(Replacement("first use of CUDA or XPU", lambda name, use: _entrance(name, use, _ENTRANCES[name])))
    for kind in device_modules():
        _watch(kind)
    # An extension may be imported later.
    _replaced.append(Replacement("other accelerators", _registering))


def _registering(_: str, register: Callable[[str, Any], None]) -> Callable[[str, Any], None]:
    @functools.wraps(register)
    def registering(device_type: str, module: Any) -> None:
        register(device_type, module)
        _watch(device_type)

    return registering


def _watch(kind: str) -> None:
    """Have the first use of these accelerators noted, unless C++ starts them by an entrance."""
    if kind not in ("cuda", "xpu"):
        what = f"{kind} is initialised"
        _replaced.append(
            Replacement("first use of other accelerators", lambda name, use: _entrance(name, use, what), [kind])
        )


def _entrance(name: str, original: Callable[..., Any], what: str) -> Callable[..., Any]:
    """A function whose first call is noted."""

    @functools.wraps(original)
    def entrance(*args: Any, **kwargs: Any) -> Any:
        if name == _COUNT and _is_mig(os.environ.get(_MASK, "")) and count_elsewhere is not None:
            return count_elsewhere()
        _note(what, sys._getframe(1))
        return original(*args, **kwargs)

    return entrance


def _is_mig(mask: str) -> bool:
    """Whether a mask names MIG instances. torch cannot count those by NVML, and would ask the driver."""
    return mask.startswith("MIG-")


def stop_noting() -> None:
    """Put the functions of torch back. Ranks have nothing to note: nobody forks them."""
    while _replaced:
        _replaced.pop().undo()


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
