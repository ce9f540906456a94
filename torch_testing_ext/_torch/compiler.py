"""The compiler's state in a process: what dynamo has compiled and counted."""

from __future__ import annotations

from contextlib import AbstractContextManager


def forget_compiled() -> None:
    """As if nothing had been compiled. `torch._dynamo.reset`, `torch._dynamo.utils.counters`: 2.11 to 2.15."""
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def strict_dynamo() -> AbstractContextManager[None]:
    """Errors of the compiler are errors. `torch._dynamo.config.patch`: 2.11 to 2.15."""
    import torch._dynamo

    return torch._dynamo.config.patch(
        raise_on_ctx_manager_usage=True, suppress_errors=False, log_compilation_metrics=False
    )
