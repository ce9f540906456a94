"""Decorators that set the environment variables of torch.distributed while a test runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch.distributed as dist

from torch_testing_ext._machine import environment

F = TypeVar("F", bound=Callable[..., Any])

c10d: Any = dist  # its type stubs lack what comes from C++


def with_nccl_blocking_wait(func: F) -> F:
    """Run the test with blocking NCCL waits and without asynchronous error handling."""

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with environment.changed(TORCH_NCCL_ASYNC_ERROR_HANDLING=None, TORCH_NCCL_BLOCKING_WAIT="1"):
            return func(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def with_dist_debug_levels(levels: Iterable[str]) -> Callable[[F], F]:
    """Run the test once at each level of TORCH_DISTRIBUTED_DEBUG. The test must not destroy its process group."""

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
