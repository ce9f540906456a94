"""Patches of FSDP2's internals: its collectives, and the steps of a parameter group.

Each `patch_*` waits at a barrier after it has read the original and before it restores it. So ranks that are threads of
one process all read the same original, and all see the replacement until the last one is done.
"""

import contextlib
import operator
import warnings
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch import nn

from torch_testing_ext._torch import fsdp_parts

AnyFunction = Callable[..., Any]


@contextlib.contextmanager
def _replaced(
    owner: Any, name: str, replacement: Any, get: AnyFunction = getattr, put: AnyFunction = setattr
) -> Iterator[None]:
    original = get(owner, name)
    dist.barrier()
    put(owner, name, replacement)
    try:
        yield
    finally:
        dist.barrier()
        put(owner, name, original)


def patch_all_gather(new_all_gather_into_tensor: AnyFunction) -> contextlib.AbstractContextManager[None]:
    return _replaced(dist, fsdp_parts.all_gather_name(), new_all_gather_into_tensor)


def patch_reduce_scatter(new_reduce_scatter_tensor: AnyFunction) -> contextlib.AbstractContextManager[None]:
    return _replaced(dist, fsdp_parts.reduce_scatter_name(), new_reduce_scatter_tensor)


def patch_all_reduce(new_all_reduce: AnyFunction) -> contextlib.AbstractContextManager[None]:
    return _replaced(dist, "all_reduce", new_all_reduce)


def patch_foreach_all_gather(new_foreach_all_gather: AnyFunction) -> contextlib.AbstractContextManager[None]:
    return _replaced(fsdp_parts.param_group_module(), "foreach_all_gather", new_foreach_all_gather)


def patch_foreach_reduce(new_foreach_reduce: AnyFunction) -> contextlib.AbstractContextManager[None]:
    return _replaced(fsdp_parts.param_group_module(), "foreach_reduce", new_foreach_reduce)


def patch_unshard(new_unshard: AnyFunction) -> contextlib.AbstractContextManager[None]:
    return _replaced(fsdp_parts.param_group_module().FSDPParamGroup, "unshard", new_unshard)


def patch_reshard(new_reshard: AnyFunction) -> contextlib.AbstractContextManager[None]:
    return _replaced(fsdp_parts.param_group_module().FSDPParamGroup, "reshard", new_reshard)


def patch_post_backward(new_post_backward: AnyFunction) -> contextlib.AbstractContextManager[None]:
    return _replaced(fsdp_parts.param_group_module().FSDPParamGroup, "post_backward", new_post_backward)


def patch_register_post_backward_hook_backward(new_backward: AnyFunction) -> contextlib.AbstractContextManager[None]:
    return _replaced(fsdp_parts.param_group_module().RegisterPostBackwardFunction, "backward", new_backward)


def reduce_scatter_with_assert(
    cls: Any, orig_reduce_scatter: AnyFunction, assert_fn: AnyFunction, *args: Any, **kwargs: Any
) -> Any:
    """Call `assert_fn` on the output tensor of a reduce-scatter, then reduce and scatter."""
    if not args and "output" not in kwargs:
        raise AssertionError(f"this reduce-scatter names no output: args {args}, kwargs {kwargs}")
    assert_fn(args[0] if args else kwargs["output"])
    return orig_reduce_scatter(*args, **kwargs)


def compiled_fsdp_test(compile_compute_on_module: type | None = None) -> Callable[[AnyFunction], AnyFunction]:
    """Run a test unchanged, and again with every module compiled that it passes to `fully_shard`.

    With `compile_compute_on_module`, only modules of that class are compiled. The test must call `fully_shard` by
    the name that its own file imported. Without Triton for the current device, the second run is omitted with a
    warning.
    """

    def decorator(test: AnyFunction) -> AnyFunction:
        @wraps(test)
        def in_each_mode(*args: Any, **kwargs: Any) -> None:
            test(*args, **kwargs)
            if fsdp_parts.has_triton():
                # Ranks share the machine, so each compiles in its own process.
                compiling = fsdp_parts.compiling_in_this_process()
                with _compiling_fully_shard(test, compile_compute_on_module), compiling:
                    test(*args, **kwargs)
            else:
                warnings.warn(f"{test.__name__}: not run compiled, as Triton is not available here", stacklevel=2)

        return in_each_mode

    return decorator


def _compiling_fully_shard(test: AnyFunction, only: type | None) -> contextlib.AbstractContextManager[None]:
    from torch.distributed.fsdp import fully_shard

    def shard_and_compile(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        sharded = fully_shard(module, *args, **kwargs)
        if only is None or isinstance(module, only):
            module.compile()
        return sharded

    return _replaced(test.__globals__, "fully_shard", shard_and_compile, operator.getitem, operator.setitem)
