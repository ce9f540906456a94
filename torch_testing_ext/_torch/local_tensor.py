"""Local tensors: all ranks in one process. All of it from `torch.distributed._local_tensor`, since 2.9."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch


def local_tensor_mode(world_size: int) -> Any:
    """A context in which local tensors of this many ranks are made and understood. `LocalTensorMode`."""
    from torch.distributed._local_tensor import LocalTensorMode

    return LocalTensorMode(frozenset(range(world_size)))


def local_ranks(world_size: int) -> Any:
    """An integer that is each rank's own number. `LocalIntNode`."""
    from torch.distributed._local_tensor import LocalIntNode

    return torch.SymInt(LocalIntNode({rank: rank for rank in range(world_size)}))


def local_ints(value: Any) -> dict[int, int]:
    """What each rank has for an integer made of local ones. `LocalIntNode._local_ints`."""
    return value.node._local_ints


def without_local_tensors() -> Any:
    """A context for what must be done once, not for each rank. `maybe_disable_local_tensor_mode`."""
    from torch.distributed._local_tensor import maybe_disable_local_tensor_mode

    return maybe_disable_local_tensor_mode()


def for_each_local_rank(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: run without side effects for each rank, on local tensors. `maybe_run_for_local_tensor`."""
    from torch.distributed._local_tensor import maybe_run_for_local_tensor

    return maybe_run_for_local_tensor(func)


def forget_dtensor_rng() -> None:
    """Let the next random DTensor make a tracker for its own mesh. `_random._rng_tracker`, all versions."""
    random: Any = sys.modules.get("torch.distributed.tensor._random")
    if random is not None:
        random._rng_tracker = None


def record_autograd(enabled: bool) -> None:
    """Does autograd tell profilers what it runs? `torch.autograd._enable_record_function`: 2.11 to 2.15."""
    torch.autograd._enable_record_function(enabled)
