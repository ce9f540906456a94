"""Accelerators: which there are, and whether this process uses them."""

from typing import Any

import torch


def extension_device_type() -> str:
    """Return the device type of an out-of-tree backend. `torch._C._get_privateuse1_backend_name`: 2.11 to 2.15."""
    return torch._C._get_privateuse1_backend_name()


def register_device_module(kind: str, module: Any) -> None:
    """Make a module that of an extension's devices, `torch.<kind>`. `torch._register_device_module`: 2.11 to 2.15."""
    register: Any = torch._register_device_module
    register(kind, module)


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
    """Whether this process has an accelerator context already."""
    return initialised_type() is not None


def accelerator_is_in_bad_fork() -> bool:
    """In a forked child: is an accelerator unusable, as the parent initialised it? `_is_in_bad_fork`: 2.11 to 2.15."""
    return any(_says(module, "_is_in_bad_fork") for module in device_modules().values())


def _says(module: Any, question: str) -> bool:
    """The answer of a device's module; no, where it cannot be asked."""
    ask = getattr(module, question, None)
    return ask is not None and bool(ask())
