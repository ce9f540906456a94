"""Comparing the state dicts of sharded models with those of whole ones."""

from __future__ import annotations

from typing import Any

from torch import nn


def gathered(state_dict: dict[str, Any]) -> dict[str, Any]:
    """With each sharded tensor whole. `torch.distributed._state_dict_utils._gather_state_dict`: 2.11 to 2.15."""
    from torch.distributed._state_dict_utils import _gather_state_dict

    return _gather_state_dict(state_dict)


def is_sharded(tensor: Any) -> bool:
    """A DTensor, or one of the older sharded tensors. `_shard.sharded_tensor.ShardedTensor`: 2.11 to 2.15."""
    from torch.distributed._shard.sharded_tensor import ShardedTensor
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, (DTensor, ShardedTensor))


def on_state_dict(module: nn.Module, saved: Any, loading: Any) -> None:
    """`saved(module, state_dict, prefix, local_metadata)` after saving, `loading(module, state_dict, prefix, ...)`
    before loading. `_register_state_dict_hook`, `_register_load_state_dict_pre_hook`: 2.11 to 2.15."""
    module._register_state_dict_hook(saved)
    module._register_load_state_dict_pre_hook(loading, with_module=True)
