"""Checks, inputs and settings that several of PyTorch's distributed suites share."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torch_testing_ext._torch import ddp_parts

from .contexts import changed_environment, within


def verify_ddp_error_logged(model_DDP: Any, err_substr: str) -> None:
    """Assert that DDP recorded this error and the iteration in which it occurred."""
    logged = ddp_parts.logged_by_ddp(model_DDP)
    for key in ("iteration", "has_error", "error"):
        if key not in logged:
            raise AssertionError(f"DDP's logging data has no {key!r}: {sorted(logged)}")
    wanted = err_substr.partition("\nException raised from ")[0]
    if wanted not in logged["error"]:
        raise AssertionError(f"{wanted!r} is not in the error that DDP logged: {logged['error']!r}")


def simple_sparse_reduce_tests(rank: int, world_size: int, num_inputs: int = 1) -> list[tuple[list[Any], list[Any]]]:
    """Return inputs of this rank and expected sums of a sparse all-reduce: 1 to 3 sparse, then 1 to 3 dense dims."""
    total = num_inputs * world_size
    first = num_inputs * rank
    cases = []
    # The numbers of sparse and of dense dims.
    for sparse_dims, dense_dims in ((1, 0), (2, 0), (3, 0), (1, 1), (1, 2), (1, 3)):
        inputs = [_sparse_input(number, total, sparse_dims, dense_dims) for number in range(total)]
        own = inputs[first : first + num_inputs]
        total_of_all = functools.reduce(torch.add, inputs)
        cases.append((own, [total_of_all] * num_inputs))
    return cases


def _sparse_input(number: int, total: int, sparse_dims: int, dense_dims: int) -> Any:
    """Ones at 0..number in the first sparse dim, at 0 in the others: any two overlap, none are equal."""
    count = number + 1
    first_dim = torch.arange(count).reshape(1, count)
    others = torch.zeros(sparse_dims - 1, count, dtype=torch.int64)
    dense_shape = [2] * dense_dims
    shape = [total, *dense_shape]
    shape += [total] * (sparse_dims - 1)
    values = torch.ones(count, *dense_shape)
    return torch.sparse_coo_tensor(torch.cat([first_dim, others]), values, shape)


F = TypeVar("F", bound=Callable[..., Any])
# Its type stubs lack what comes from C++.
c10d: Any = dist


def with_nccl_blocking_wait(func: F) -> F:
    """Run the test with blocking NCCL waits and without asynchronous error handling."""
    variables = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": None, "TORCH_NCCL_BLOCKING_WAIT": "1"}
    decorate = within(lambda: changed_environment(**variables))
    return decorate(func)


def with_dist_debug_levels(levels: Iterable[str]) -> Callable[[F], F]:
    """Run the test once at each level of TORCH_DISTRIBUTED_DEBUG. The test must not destroy its process group."""

    def decorate(func: F) -> F:
        @functools.wraps(func)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = None
            for level in levels:
                with changed_environment(TORCH_DISTRIBUTED_DEBUG=level):
                    c10d.set_debug_level_from_env()
                    result = func(*args, **kwargs)
                    c10d.barrier()
            c10d.set_debug_level_from_env()
            return result

        return wrapper  # type: ignore[return-value]

    return decorate
