"""The seed of every test, and a context that restores random state."""

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

from torch_testing_ext._torch.devices import accelerator_state, build_options

SEED = 1234


def set_rng_seed(seed: int | None = None) -> None:
    """Seed torch, `random`, and NumPy where it is imported; with SEED by default."""
    seed = SEED if seed is None else seed
    if build_options.device_may_exist():
        torch.manual_seed(seed)
    else:
        # The CPU's generator alone: torch.manual_seed also queues seeds for devices, which costs each rank 1 ms.
        torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy_random = _numpy_random()
    if numpy_random is not None:
        numpy_random.seed(seed)


def prepare_to_seed() -> None:
    """In a process that forks ranks: import numpy.random, which NumPy otherwise imports in each rank when it seeds."""
    _numpy_random()


def _numpy_random() -> Any:
    """numpy.random if NumPy is imported."""
    return sys.modules["numpy"].random if "numpy" in sys.modules else None


@contextlib.contextmanager
def freeze_rng_state() -> Iterator[None]:
    """Restore torch's random state at the end: the CPU's, and that of the device in use, if any."""
    # Only an initialised device has random state; this check must not initialise one.
    kind = accelerator_state.initialised_type()
    devices = [] if kind is None else [torch.get_device_module(kind).current_device()]
    with torch.random.fork_rng(devices=devices, device_type=kind or "cuda"):
        yield
