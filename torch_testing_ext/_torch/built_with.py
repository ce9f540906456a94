"""The options with which torch was built."""

from __future__ import annotations

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
