"""Accelerators: which ones torch supports, and whether this process has initialised them."""

from __future__ import annotations

from typing import Any

import torch

from .built_with import extension_device_type


def accelerator_is_initialised() -> bool:
    """Does this process have an accelerator context already? `torch.cuda`, `torch.xpu`: 2.11 to 2.15."""
    cuda: Any = torch.cuda  # untyped in torch
    xpu: Any = torch.xpu
    return bool(cuda.is_initialized()) or bool(xpu.is_initialized())


def accelerator_is_in_bad_fork() -> bool:
    """In a forked child: is CUDA or XPU unusable, as the parent initialised it? `_is_in_bad_fork`: 2.11 to 2.15."""
    return torch.cuda._is_in_bad_fork() or torch.xpu._is_in_bad_fork()


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


def has_multicast() -> bool:
    """Does the first CUDA device support multicast? `_SymmetricMemory.has_multicast_support`: 2.11 to 2.15."""
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory.has_multicast_support(DeviceType.CUDA, 0)
