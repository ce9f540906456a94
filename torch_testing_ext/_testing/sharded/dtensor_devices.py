"""The devices and the number of ranks of DTensor tests.

A test file may set the constants in the mirror.
"""

from typing import Any

import torch.distributed as dist

from torch_testing_ext._machine import accelerators, device_sharing
from torch_testing_ext._machine.shared_names import ComputedNames

DEFAULT_RANKS = 4


def _type() -> str:
    return accelerators.accelerator_type() or "cpu"


# As in PyTorch, setting one does not change the others.
constants: Any = ComputedNames(
    # Tests replace the function.
    DEVICE_COUNT=lambda: accelerators.device_count(),
    DEVICE_TYPE=_type,
    NUM_DEVICES=lambda: min(count, DEFAULT_RANKS) if (count := accelerators.most_ranks()) > 1 else DEFAULT_RANKS,
    PG_BACKEND=lambda: dist.get_default_backend_for_device(_type()),
)


def num_devices() -> int:
    """Return the default number of ranks: one for each accelerator, at most 4; with fewer than 2, 4 on the CPU."""
    return int(constants.NUM_DEVICES)


def device_type() -> str:
    return str(constants.DEVICE_TYPE)


def device_type_for(world_size: int) -> str:
    most = constants.DEVICE_COUNT * device_sharing.ranks_per_device()
    enough = accelerators.device_count() > 0 and world_size <= most
    return device_type() if enough else "cpu"


# Keeps these frames out of tracebacks.
__unittest = True
