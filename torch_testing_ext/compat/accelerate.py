"""A stand-in for Accelerate's launcher of tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from torch_testing_ext._testing.bases.spawned_functions import spawn
from torch_testing_ext._tests.launcher_variables import OF_ONE_RANK, TORCHRUN

# Keeps these frames out of the tracebacks of unittest and of pytest.
__unittest = True
__tracebackhide__ = True


def debug_launcher(function: Callable[..., object], args: Sequence[Any] = (), num_processes: int = 2) -> None:
    """Call `function(*args)` in ranks on the CPU with a gloo group."""
    spawn(_call_on_cpu, num_processes, function, args, backend="gloo")


def _call_on_cpu(rank: int, function: Callable[..., object], args: Sequence[Any]) -> None:
    # Accelerate sets none of these: they would make one rank a launch.
    for name in (*OF_ONE_RANK, TORCHRUN.local_world_size):
        os.environ.pop(name, None)
    os.environ.update(ACCELERATE_USE_CPU="yes", ACCELERATE_MIXED_PRECISION="no", FORK_LAUNCHED="1")
    function(*args)
