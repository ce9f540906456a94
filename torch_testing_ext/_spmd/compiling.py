"""`compile`, the decorator that makes a train step data parallel."""

from collections.abc import Callable
from typing import Any, Literal, get_args

from .capture.capture_step import CaptureStep
from .capture.program_maker import GraphPasses
from .capture.region_step import RegionStep
from .capture.verification import VerifyMode
from .engine.engine_step import EngineStep
from .parallel_modes import DataParallel, GraphPass, Override, ParallelMode
from .spmd_errors import SPMDError, check_choice

Backend = Literal["engine", "capture", "fx", "inductor"]


def compile(
    module_override: list[Override] | None = None,
    gm_transformation: GraphPass | None = None,
    parallel_mode: ParallelMode | None = None,
    *,
    backend: Backend | None = None,
    verify: VerifyMode = "first",
) -> Callable[[Callable[..., Any]], EngineStep | CaptureStep]:
    """Make a train step written for one device data parallel: `step(model, optimizer, batch)`.

    Every rank calls the step with its own batch. The first call gives all ranks rank 0's weights. The update applies
    the mean gradient over ranks; the return value is the rank's own.

    module_override: replaces submodules while the step is recorded; see `Override`. Implies backend="capture".
    gm_transformation: called with the final graph module; changes it in place or returns another. Implies
        backend="capture".
    parallel_mode: `DataParallel("replicate")` by default.
    backend: "engine", the default, runs the step's Python, and averages and shards around it. "capture" records the
        whole step as one program that runs operation by operation ("fx" is its old name). "inductor" is the engine
        with torch.compile for forward and optimizers, from the second call on.
    verify: of what is recorded or compiled: "first" also runs the engine at the first call of each program and at
        random later ones, and raises an error if the results differ; "always" does so at every call, "off" at none.
    """
    check_choice("verify", verify, get_args(VerifyMode))
    check_choice("backend", backend, (*get_args(Backend), None))
    mode = parallel_mode if parallel_mode is not None else DataParallel()
    passes = [each for each in (getattr(mode, "custom_passes", None), gm_transformation) if each is not None]
    if backend in ("engine", "inductor") and (module_override or passes):
        raise SPMDError(f"backend={backend!r} runs Python and has no graph to change.", remedy='Use backend="capture".')
    if not isinstance(mode, DataParallel):
        raise SPMDError(f"parallel_mode is {mode!r}.", remedy="Pass a DataParallel.")
    chosen = backend or ("capture" if module_override or passes else "engine")

    def decorate(step: Callable[..., Any]) -> EngineStep | CaptureStep:
        if chosen == "engine":
            return EngineStep(step, mode)
        if chosen == "inductor":
            return RegionStep(step, mode, verify)
        return CaptureStep(step, mode, GraphPasses(mode.bucket_bytes, list(module_override or ()), passes), verify)

    return decorate
