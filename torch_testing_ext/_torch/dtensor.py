"""Meshes of DTensor, and tensors that it treats specially."""

from __future__ import annotations

import sys
from typing import Any

import torch


def concatenate_meshes(meshes: list[Any]) -> Any:
    """Return one mesh with the dimensions of all `meshes`, which must have the same root mesh.

    `DeviceMesh._concatenate` since torch 2.10.
    """
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh._concatenate(meshes)


def is_functional_tensor(tensor: Any) -> bool:
    """Does it wrap another tensor for functionalization? `torch._is_functional_tensor`, all versions."""
    return torch._is_functional_tensor(tensor)


def is_local_tensor(tensor: Any) -> bool:
    """Is it a local tensor, which simulates all ranks? `torch.distributed._local_tensor.LocalTensor` since 2.9.

    None exists before that module is imported.
    """
    module = sys.modules.get("torch.distributed._local_tensor")
    return module is not None and isinstance(tensor, module.LocalTensor)
