"""`compile`, the decorator that makes a train step data parallel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

from torch import fx

from .engine.engine_step import EngineStep
from .parallel_modes import DataParallel, ParallelMode
from .run.step import CompiledStep
from .run.verify import VerifyMode
from .spmd_errors import SPMDError
from .trace.override import Override

Backend = Literal["engine", "capture", "fx", "inductor"]


def compile(
    module_override: list[Override] | None = None,
    gm_transformation: Callable[[fx.GraphModule], fx.GraphModule | None] | None = None,
    parallel_mode: ParallelMode | None = None,
    *,
    backend: Backend | None = None,
    verify: VerifyMode = "first",
) -> Callable[[Callable[..., Any]], EngineStep | CompiledStep]:
    """Make a train step written for one device data parallel: `step(model, optimizer, batch)`.

    Every rank calls the step with its own batch. The first call gives all ranks rank 0's weights. The update applies
    the mean gradient over ranks; the return value is the rank's own.

    module_override: replaces submodules while the step is traced; see `Override`. Implies backend="capture".
    gm_transformation: called with the final graph module; changes it in place or returns another. Implies
        backend="capture".
    parallel_mode: `DataParallel("replicate")` by default.
    backend: "engine", the default, runs the step's Python, and averages and shards around it. "capture" records the
        whole step as one program that runs operation by operation ("fx" is its old name); "inductor" compiles that.
    verify: of a recorded program: "first" also runs the step eagerly at the first call of each program, and raises an
        error if the results differ; "always" does so at every call.
    """
    if verify not in get_args(VerifyMode):
        raise SPMDError(
            f"Unknown verify {verify!r}.", remedy=f"Use one of {', '.join(map(repr, get_args(VerifyMode)))}."
        )
    if backend is not None and backend not in get_args(Backend):
        raise SPMDError(
            f"Unknown backend {backend!r}.", remedy=f"Use one of {', '.join(map(repr, get_args(Backend)))}."
        )
    mode = parallel_mode if parallel_mode is not None else DataParallel()
    if not isinstance(mode, ParallelMode):
        raise SPMDError(f"parallel_mode is {mode!r}.", remedy="Pass a ParallelMode, such as DataParallel().")

    recorded = bool(module_override) or gm_transformation is not None or _has_passes(mode)
    if backend == "engine" and recorded:
        raise SPMDError(
            "The engine runs Python and has no graph to change.", remedy='Use backend="capture", or no override.'
        )
    chosen = backend or ("capture" if recorded or not isinstance(mode, DataParallel) else "engine")

    def decorate(step: Callable[..., Any]) -> EngineStep | CompiledStep:
        if chosen == "engine":
            assert isinstance(mode, DataParallel)
            return EngineStep(step, mode)
        name: Literal["fx", "inductor"] = "inductor" if chosen == "inductor" else "fx"
        return CompiledStep(step, mode, name, list(module_override or ()), gm_transformation, verify)

    return decorate


def _has_passes(mode: ParallelMode) -> bool:
    return isinstance(mode, DataParallel) and mode.custom_passes is not None
