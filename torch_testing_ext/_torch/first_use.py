"""Finds the line that first used an accelerator in this process, after which it is not safe to fork.

torch's Python functions, and C++ through them, start CUDA and XPU by a few functions of `torch._C`. Until the first of
them is called, each is replaced by a function that notes its caller.
"""

import functools
import os
import sys
import traceback
from types import FrameType
from typing import Any

import torch

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
# `_cuda_init`, `_cuda_getDeviceCount`, `_xpu_init`, `_xpu_getDeviceCount`: 2.11 to 2.15, where torch is built for them.
_CUDA = "ROCm" if torch.version.hip is not None else "CUDA"
_ENTRANCES = {
    "_cuda_init": f"{_CUDA} is initialised",
    "_cuda_getDeviceCount": f"the driver of {_CUDA} is asked for its devices",
    "_xpu_init": "XPU is initialised",
    "_xpu_getDeviceCount": "the driver of XPU is asked for its devices",
}

_UNTYPED: tuple[Any, Any] = torch.cuda, torch.xpu

_noted: str | None = None
_originals: dict[str, Any] = {}


def note_first_use() -> None:
    """Note the first line that uses an accelerator, if none has yet."""
    global _noted
    if _originals or _noted is not None:
        return
    cuda, xpu = _UNTYPED
    if cuda.is_initialized() or xpu.is_initialized():
        _noted = "an accelerator was initialised before torch_testing_ext was imported"
        return
    for name in _ENTRANCES:
        if (original := getattr(torch._C, name, None)) is not None:
            _originals[name] = original
            setattr(torch._C, name, _noting(name, original))


def stop_noting() -> None:
    """Put the functions of torch back. Ranks have nothing to note: nobody forks them."""
    for name, original in _originals.items():
        setattr(torch._C, name, original)


def first_use() -> str | None:
    """The first use of an accelerator, as "CUDA is initialised in test_x.py:12"; None if nothing is known to have."""
    return _noted


def _noting(name: str, original: Any) -> Any:
    @functools.wraps(original)
    def entrance(*args: Any) -> Any:
        _note(name, sys._getframe(1))
        return original(*args)

    return entrance


def _note(name: str, frame: FrameType) -> None:
    global _noted
    _noted = _noted or f"{_ENTRANCES[name]}{_place(frame)}"
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
