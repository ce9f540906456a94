"""The state of torch's compiler in this process: its modules, caches and worker processes."""

import sys
from contextlib import AbstractContextManager


def reset_dynamo() -> None:
    """Forget what torch.compile has compiled, if it ran at all. `torch._dynamo.reset`, all versions."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()


def end_compile_workers() -> None:
    """End inductor's pool of compile processes, which the interpreter's tear-down would have ended.

    `torch._inductor.async_compile.shutdown_compile_workers`, all versions.
    """
    pool = sys.modules.get(COMPILE_POOL)
    if pool is not None:
        pool.shutdown_compile_workers()


# Takes seconds to import: DDP, FSDP and operators of DTensor do that when they are first used. 2.11 to 2.15.
DYNAMO = "torch._dynamo"
INDUCTOR = "torch._inductor.compile_fx"
# Imported with whatever starts the pool of compile processes. All versions.
COMPILE_POOL = "torch._inductor.async_compile"


def forget_compiled() -> None:
    """Clear caches and counters. `torch._dynamo.reset`, `torch._dynamo.utils.counters`: 2.11 to 2.15."""
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def strict_dynamo() -> AbstractContextManager[None]:
    """A context in which dynamo raises errors instead of falling back. `torch._dynamo.config.patch`: 2.11 to 2.15."""
    import torch._dynamo

    patch: AbstractContextManager[None] = torch._dynamo.config.patch(
        raise_on_ctx_manager_usage=True, suppress_errors=False, log_compilation_metrics=False
    )
    return patch


def without_compiled_autograd() -> AbstractContextManager[None]:
    """A context in which backward passes are not compiled. `compiled_autograd._disable`: 2.11 to 2.15."""
    from torch._dynamo import compiled_autograd

    context: AbstractContextManager[None] = compiled_autograd._disable()
    return context
