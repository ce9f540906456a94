"""`compile`, under the name of torch.distributed._spmd.api. As there, the model holds DTensors between calls."""

from collections.abc import Callable
from typing import Any

from torch_testing_ext._spmd.compiling import compiled
from torch_testing_ext._spmd.modes import ParallelMode


def compile(
    module_override: Any = None,
    gm_transformation: Any = None,
    parallel_mode: ParallelMode | None = None,
    *,
    backend: str = "engine",
) -> Callable[[Callable[..., Any]], Any]:
    """Make a train step data parallel, as `torch_testing_ext.distributed._spmd.compile` does.

    Between calls, parameters are DTensors also if they are replicated.
    """
    return compiled(module_override, gm_transformation, parallel_mode, backend, rests=True)
