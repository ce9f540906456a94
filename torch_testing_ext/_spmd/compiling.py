"""`compile`: makes a train step for one device data parallel."""

import functools
import types
from collections.abc import Callable
from typing import Any

from .modes import NO_GRAPH, DataParallel, ParallelMode, SPMDError
from .step_engine import current_engine


class CompiledStep:
    """A train step whose state is data parallel. Calling it runs the user's Python."""

    def __init__(self, function: Callable[..., Any], mode: DataParallel, rests: bool) -> None:
        functools.update_wrapper(self, function)
        # `rests`: whether replicated parameters are DTensors between calls, as sharded ones are.
        self.function, self.mode, self.rests = function, mode, rests

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return current_engine().call(self, args, kwargs)


def compile(
    module_override: Any = None,
    gm_transformation: Any = None,
    parallel_mode: ParallelMode | None = None,
    *,
    backend: str = "engine",
) -> Callable[[Callable[..., Any]], CompiledStep]:
    """Make a train step data parallel. What changes graphs in PyTorch's compiler is refused."""
    return compiled(module_override, gm_transformation, parallel_mode, backend, rests=False)


def compiled(
    module_override: Any, gm_transformation: Any, parallel_mode: ParallelMode | None, backend: str, *, rests: bool
) -> Callable[[Callable[..., Any]], CompiledStep]:
    """`compile`, with the form of replicated parameters between calls."""
    graphs = {"module_override": module_override, "gm_transformation": gm_transformation}
    for name, value in graphs.items():
        if value is not None:
            raise SPMDError(f"Steps are not recorded, so there is no graph for {name}.", remedy=NO_GRAPH)
    if backend != "engine":
        raise SPMDError(
            f"There is no backend {backend!r}: a step runs as it is written.",
            remedy="Compile the model with torch.compile, before the first call or in the step.",
        )
    mode = DataParallel() if parallel_mode is None else parallel_mode
    if not isinstance(mode, DataParallel):
        raise SPMDError(f"Unknown parallel mode {mode!r}.", remedy="Use DataParallel.")
    return lambda function: CompiledStep(function, mode, rests)
