"""`compile`, the decorator that makes a train step data parallel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

from torch import fx

from .parallel_modes import DataParallel, ParallelMode
from .run.step import CompiledStep
from .run.verify import VerifyMode
from .spmd_errors import SPMDError
from .trace.override import Override

Backend = Literal["fx", "inductor"]


def compile(
    module_override: list[Override] | None = None,
    gm_transformation: Callable[[fx.GraphModule], fx.GraphModule | None] | None = None,
    parallel_mode: ParallelMode | None = None,
    *,
    backend: Backend = "fx",
    verify: VerifyMode = "first",
) -> Callable[[Callable[..., Any]], CompiledStep]:
    """Compile a whole train step (forward, backward, optimizer) into a program that runs on every rank.

    The step is written for one device: `step(model, optimizer, batch)`. Every rank calls the compiled step with its
    own batch. The first call gives all ranks rank 0's weights and turns parameters and optimizer states into DTensors,
    in place. The update applies the mean gradient over ranks; the return value is the rank's own.

    module_override: replaces submodules while the step is traced; see `Override`.
    gm_transformation: called with the final graph module; changes it in place or returns another.
    parallel_mode: `DataParallel("replicate")` by default.
    backend: "fx" runs the graph operation by operation, bit for bit like eager; "inductor" compiles it.
    verify: "first" also runs the step eagerly at the first call of each program, and raises an error if the results
        differ; "always" does so at every call.
    """
    if verify not in get_args(VerifyMode):
        raise SPMDError(
            f"Unknown verify {verify!r}.", remedy=f"Use one of {', '.join(map(repr, get_args(VerifyMode)))}."
        )
    if backend not in get_args(Backend):
        raise SPMDError(
            f"Unknown backend {backend!r}.", remedy=f"Use one of {', '.join(map(repr, get_args(Backend)))}."
        )
    mode = parallel_mode if parallel_mode is not None else DataParallel()
    if not isinstance(mode, ParallelMode):
        raise SPMDError(f"parallel_mode is {mode!r}.", remedy="Pass a ParallelMode, such as DataParallel().")

    def decorate(step: Callable[..., Any]) -> CompiledStep:
        return CompiledStep(step, mode, backend, list(module_override or ()), gm_transformation, verify)

    return decorate
