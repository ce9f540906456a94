"""The state of dynamo in a process: compiled code and counters."""

from __future__ import annotations

from contextlib import AbstractContextManager

# Takes seconds to import: DDP, FSDP and operators of DTensor do that when they are first used. 2.11 to 2.15.
DYNAMO = "torch._dynamo"
INDUCTOR = "torch._inductor.compile_fx"


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
