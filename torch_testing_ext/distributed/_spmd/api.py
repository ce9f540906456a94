"""`compile`, under the name of torch.distributed._spmd.api. As there, the model holds DTensors between calls."""

import copy
from collections.abc import Callable
from typing import Any

from torch_testing_ext._spmd import compiling
from torch_testing_ext._spmd.parallel_modes import DataParallel, ParallelMode


def compile(
    module_override: Any = None,
    gm_transformation: Any = None,
    parallel_mode: ParallelMode | None = None,
    **options: Any,
) -> Callable[[Callable[..., Any]], Any]:
    """Make a train step data parallel, as `torch_testing_ext.distributed._spmd.compile` does.

    Between calls, parameters are DTensors also if they are replicated, unless the mode says otherwise.
    """
    mode = DataParallel() if parallel_mode is None else parallel_mode
    if isinstance(mode, DataParallel) and mode.between is None:
        mode = copy.copy(mode)
        mode.between = "dtensor"
    return compiling.compile(module_override, gm_transformation, mode, **options)
