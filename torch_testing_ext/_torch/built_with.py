"""Options with which torch was built, and its accelerators: which there are, and whether this process uses them."""

from typing import Any

import torch


def onednn_uses_arm_compute_library() -> bool:
    """Does oneDNN use the Arm Compute Library? `torch.ops.mkldnn._is_mkldnn_acl_supported`: 2.11 to 2.15."""
    return bool(torch.ops.mkldnn._is_mkldnn_acl_supported())


def is_internal_build() -> bool:
    """Was torch built in Meta's own repository? `torch._utils_internal.IS_FBSOURCE`, set only there."""
    return bool(getattr(torch._utils_internal, "IS_FBSOURCE", False))


def extension_device_type() -> str:
    """Return the device type of an out-of-tree backend. `torch._C._get_privateuse1_backend_name`: 2.11 to 2.15."""
    return torch._C._get_privateuse1_backend_name()


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
