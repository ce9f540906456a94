"""DTensor."""

from __future__ import annotations

import sys
from typing import Any

import torch


def concatenate_meshes(meshes: list[Any]) -> Any:
    """One mesh with the dimensions of all `meshes`, which must come from one root mesh.

    `DeviceMesh._concatenate` since torch 2.10.
    """
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh._concatenate(meshes)


def is_functional_tensor(tensor: Any) -> bool:
    """Does it wrap another tensor for functionalization? `torch._is_functional_tensor`, all versions."""

    return torch._is_functional_tensor(tensor)


def is_local_tensor(tensor: Any) -> bool:
    """Does it hold what every rank would hold? `torch.distributed._local_tensor.LocalTensor` since 2.9.

    There can be none before somebody imported that module.
    """
    module = sys.modules.get("torch.distributed._local_tensor")
    return module is not None and isinstance(tensor, module.LocalTensor)
