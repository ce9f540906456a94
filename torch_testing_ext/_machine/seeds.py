"""The seed of every test, and a context that restores random state."""

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

from . import accelerators

SEED = 1234


def set_rng_seed(seed: int | None = None) -> None:
    """Seed torch, `random`, and NumPy where it is imported; with SEED by default."""
    seed = SEED if seed is None else seed
    if accelerators.device_may_exist():
        torch.manual_seed(seed)
    else:
        # The CPU's generator alone: torch.manual_seed also queues seeds for devices, which costs each rank 1 ms.
        torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


def prepare_to_seed() -> None:
    """In a process that forks ranks: import numpy.random, which NumPy otherwise imports in each rank when it seeds."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        _ = numpy.random


@contextlib.contextmanager
def freeze_rng_state() -> Iterator[None]:
    """Restore torch's random state at the end: the CPU's, and that of the device in use, if any."""
    # Only an initialised device has random state; this check must not initialise one.
    initialised = [name for name in ("cuda", "xpu") if getattr(torch, name).is_initialized()]
    devices = []
    for name in initialised[:1]:
        devices.append(getattr(torch, name).current_device())
    kind = initialised[0] if initialised else "cuda"
    with torch.random.fork_rng(devices=devices, device_type=kind):
        yield


class RandomState:
    """The states of the random generators of torch, Python and numpy."""

    def __init__(self) -> None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        modules: list[Any] = [torch]
        if accelerator is not None:
            modules.append(getattr(torch, accelerator.type))
        pairs = [(module.get_rng_state, module.set_rng_state) for module in modules]
        pairs.append((random.getstate, random.setstate))
        # torch does not require it.
        if "numpy" in sys.modules:
            numpy: Any = sys.modules["numpy"]
            pairs.append((numpy.random.get_state, numpy.random.set_state))
        self._states = [(put, get()) for get, put in pairs]

    def restore(self) -> None:
        for put, state in self._states:
            put(state)
