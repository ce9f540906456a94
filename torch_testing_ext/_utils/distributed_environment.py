"""Decorators that set what torch.distributed reads from the environment while a test runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch.distributed as c10d

from torch_testing_ext._machine import environment

F = TypeVar("F", bound=Callable[..., Any])
Decorator = Callable[[F], F]


def with_nccl_blocking_wait(func: F) -> F:
    """NCCL waits block while the test runs, and errors are not handled asynchronously."""

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with environment.changed(TORCH_NCCL_ASYNC_ERROR_HANDLING=None, TORCH_NCCL_BLOCKING_WAIT="1"):
            return func(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def with_dist_debug_levels(levels: Iterable[str]) -> Decorator:
    """Run the test once at each level of TORCH_DISTRIBUTED_DEBUG. The process group must outlive it."""

    def decorate(func: F) -> F:
        @functools.wraps(func)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = None
            for level in levels:
                with environment.changed(TORCH_DISTRIBUTED_DEBUG=level):
                    c10d.set_debug_level_from_env()
                    result = func(*args, **kwargs)
                    c10d.barrier()
            c10d.set_debug_level_from_env()
            return result

        return wrapper  # type: ignore[return-value]

    return decorate
