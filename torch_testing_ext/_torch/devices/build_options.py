"""The options with which torch was built."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .accelerator_state import extension_device_type


def onednn_uses_arm_compute_library() -> bool:
    """Whether oneDNN uses the Arm Compute Library. `torch.ops.mkldnn._is_mkldnn_acl_supported`: 2.11 to 2.15."""
    return bool(torch.ops.mkldnn._is_mkldnn_acl_supported())


def is_internal_build() -> bool:
    """Whether torch was built in Meta's own repository. `torch._utils_internal.IS_FBSOURCE`, set only there."""
    return bool(getattr(torch._utils_internal, "IS_FBSOURCE", False))


def has_lapack() -> bool:
    """Whether torch was built with LAPACK. `torch._C.has_lapack`: 2.11 to 2.15."""
    return bool(torch._C.has_lapack)


def cpu_capabilities() -> dict[str, object]:
    """Return what the CPU can do, such as "avx512_vnni". `torch.cpu.get_capabilities`: 2.11 to 2.15."""
    cpu: Any = torch.cpu  # its stubs differ between versions
    return dict(cpu.get_capabilities())


def cpu_kernels() -> str:
    """Return the instructions for which kernels are chosen, such as "AVX512". `_get_cpu_capability`: 2.11 to 2.15."""
    return str(torch._C._get_cpu_capability())


def other_accelerator_is_built() -> bool:
    """Whether torch is built, or extended, for an accelerator other than CUDA and ROCm.

    `torch.xpu._is_compiled`, `torch._C._mtia_isBuilt`, `_get_privateuse1_backend_name`: 2.11 to 2.15.
    """
    return (
        torch.xpu._is_compiled()
        or torch._C._mtia_isBuilt()
        or torch.backends.mps.is_built()
        or hasattr(torch, "hpu")
        or hasattr(torch, extension_device_type())
    )


def device_may_exist(dev: Path = Path("/dev"), environ: Mapping[str, str] = os.environ) -> bool:
    """Could this torch find a device on this machine? False only where that is certain."""
    if torch.version.cuda is not None or torch.version.hip is not None:
        is_hidden = environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        has_node = any(dev.glob("nvidia[0-9]*")) or any((dev / name).exists() for name in ("nvidiactl", "dxg", "kfd"))
        if has_node and not is_hidden:
            return True
    return other_accelerator_is_built()


def has_multicast() -> bool:
    """Whether the first CUDA device supports multicast. `_SymmetricMemory.has_multicast_support`: 2.11 to 2.15."""
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory.has_multicast_support(DeviceType.CUDA, 0)
