"""The generators of fake accelerators."""

from typing import Any

import torch

from . import KIND
from .fake_devices import device_count, index_of
from .fake_library import library


def _generator(device: Any = None) -> torch.Generator:
    generator: torch.Generator = library.default_generator(index_of(device))
    return generator


def get_rng_state(device: Any = KIND) -> torch.Tensor:
    """Return the state of the random numbers of a device."""
    return _generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = KIND) -> None:
    """Set the state of the random numbers of a device."""
    _generator(device).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the states of all devices."""
    return [get_rng_state(number) for number in range(device_count())]


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    """Set the states of all devices."""
    for number, state in enumerate(new_states):
        set_rng_state(state, number)


def initial_seed() -> int:
    """Return the seed of the current device."""
    return _generator().initial_seed()


def manual_seed(seed: int) -> None:
    """Seed the current device."""
    _generator().manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed all devices. Does not use them."""
    for number in range(device_count()):
        _generator(number).manual_seed(int(seed))
