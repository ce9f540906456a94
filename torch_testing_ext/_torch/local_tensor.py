"""Local tensors, which simulate all ranks in one process: `torch.distributed._local_tensor`, since 2.9."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def local_tensor_mode(world_size: int) -> Any:
    """A context in which torch creates and handles local tensors of this many ranks. `LocalTensorMode`."""
    from torch.distributed._local_tensor import LocalTensorMode

    return LocalTensorMode(frozenset(range(world_size)))


def local_ranks(world_size: int) -> Any:
    """Return an integer whose value in each rank is that rank's number. `LocalIntNode`."""
    from torch.distributed._local_tensor import LocalIntNode

    sym_int: Any = torch.SymInt  # untyped in torch
    return sym_int(LocalIntNode({rank: rank for rank in range(world_size)}))


def local_ints(value: Any) -> dict[int, int]:
    """Return the value of a local integer in each rank. `LocalIntNode._local_ints`."""
    ints: dict[int, int] = value.node._local_ints
    return ints


def without_local_tensors() -> Any:
    """A context for work to do once and not for each rank. `maybe_disable_local_tensor_mode`."""
    from torch.distributed._local_tensor import maybe_disable_local_tensor_mode

    return maybe_disable_local_tensor_mode()


def for_each_local_rank(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: run a function without side effects once for each rank of its local tensors.

    `maybe_run_for_local_tensor`.
    """
    from torch.distributed._local_tensor import maybe_run_for_local_tensor

    return maybe_run_for_local_tensor(func)


def record_autograd(enabled: bool) -> None:
    """Turn autograd's events for profilers on or off. `torch.autograd._enable_record_function`: 2.11 to 2.15."""
    autograd: Any = torch.autograd
    autograd._enable_record_function(enabled)
