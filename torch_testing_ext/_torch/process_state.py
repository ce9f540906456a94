"""State of a process beyond tensors: modes of functions, the compiler's caches, the collector of cyclic garbage."""

import gc
from contextlib import AbstractContextManager
from typing import Any

import torch

# Takes seconds to import: DDP, FSDP and operators of DTensor do that when they are first used. 2.11 to 2.15.
DYNAMO = "torch._dynamo"
INDUCTOR = "torch._inductor.compile_fx"


# -- modes


def torch_function_modes() -> int:
    """Count the active torch function modes (a default device is one). `_len_torch_function_stack`: 2.11 to 2.15."""
    return torch._C._len_torch_function_stack()


def pop_torch_function_mode() -> None:
    """Remove the innermost torch function mode. `_pop_torch_function_stack`: 2.11 to 2.15."""
    torch._C._pop_torch_function_stack()


def torch_function_state() -> Any:
    """Is `__torch_function__` enabled? `_get_torch_function_state`: 2.11 to 2.15."""
    return torch._C._get_torch_function_state()  # type: ignore[attr-defined, unused-ignore]


def set_torch_function_state(state: Any) -> None:
    """Restore a result of `torch_function_state`. `_set_torch_function_state`: 2.11 to 2.15."""
    torch._C._set_torch_function_state(state)  # type: ignore[attr-defined, unused-ignore]


# -- the compiler


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


# -- the collector: importing torch leaves some hundred thousand objects that stay


def postpone_collection() -> None:
    """Have the next full collection come later: one takes a tenth of a second, and the last import may be at fault.

    All objects become old ones, and the collector counts from zero again. Nothing is exempt from collection.
    """
    if not gc.get_freeze_count():  # what somebody has exempted stays exempt
        gc.freeze()
        gc.unfreeze()


def exempt_imported(garbage: int | None = 1) -> None:
    """Exempt all that exists from collection, so that the collectors of forked processes do not write to shared pages.

    Also, the collections at the interpreter's end would otherwise take a quarter of the time of a short program.
    `garbage`: the oldest generation from which garbage is collected first, 2 for all. With None, none is: in a forked
    process, finalizers would act on what its parent has.
    """
    if garbage is not None:
        gc.collect(garbage)
    gc.freeze()
