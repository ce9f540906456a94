"""Helpers to compare the state dicts of sharded models with those of unsharded ones, and to store them."""

from __future__ import annotations

from typing import Any

from torch import nn


def gathered(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Gather each sharded tensor. `torch.distributed._state_dict_utils._gather_state_dict`: 2.11 to 2.15."""
    from torch.distributed._state_dict_utils import _gather_state_dict

    return _gather_state_dict(state_dict)


def is_sharded(tensor: Any) -> bool:
    """Is it a DTensor, or one of the older sharded tensors? `_shard.sharded_tensor.ShardedTensor`: 2.11 to 2.15."""
    from torch.distributed._shard.sharded_tensor import ShardedTensor  # type: ignore[attr-defined, unused-ignore]
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, (DTensor, ShardedTensor))


def on_state_dict(module: nn.Module, saved: Any, loading: Any) -> None:
    """Call `saved(module, state_dict, prefix, local_metadata)` after saving the state of `module`, and
    `loading(module, state_dict, prefix, ...)` before loading it.

    `_register_state_dict_hook`, `_register_load_state_dict_pre_hook`: 2.11 to 2.15.
    """
    hooks: Any = module  # whose registration methods are untyped in torch
    hooks._register_state_dict_hook(saved)
    hooks._register_load_state_dict_pre_hook(loading, with_module=True)


def stream_extension_class() -> Any:
    """Return the base of extensions that change the bytes. `StreamTransformExtension`: 2.11 to 2.15."""
    from torch.distributed.checkpoint._extension import StreamTransformExtension

    return StreamTransformExtension


def new_extension_registry() -> Any:
    """Return a table of extensions with those of torch. `torch.distributed.checkpoint._extension`: 2.11 to 2.15."""
    from torch.distributed.checkpoint._extension import ExtensionRegistry

    return ExtensionRegistry()
