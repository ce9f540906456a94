"""The options with which torch was built."""

from __future__ import annotations

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
