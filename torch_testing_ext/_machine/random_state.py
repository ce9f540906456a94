"""The states of all random generators of a process, to go back to them."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


class RandomState:
    """The states of the random generators of torch, Python and numpy."""

    def __init__(self) -> None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        modules: list[Any] = [torch] if accelerator is None else [torch, getattr(torch, accelerator.type)]
        pairs = [(module.get_rng_state, module.set_rng_state) for module in modules]
        pairs.append((random.getstate, random.setstate))
        if "numpy" in sys.modules:  # torch does not require it
            numpy: Any = sys.modules["numpy"]
            pairs.append((numpy.random.get_state, numpy.random.set_state))
        self._states = [(put, get()) for get, put in pairs]

    def restore(self) -> None:
        for put, state in self._states:
            put(state)
