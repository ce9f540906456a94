"""Global state that one test may leave changed for later tests in the same process.

Random state does not count: every test uses it, and every test begins with the same seeds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

# Environment variables that torch itself sets when it first compiles something.
_SET_BY_TORCH = ("TORCHINDUCTOR_", "TRITON_", "KINETO_")


@dataclass(frozen=True)
class _Identity:
    """Compares an object by identity, and shows it without its address."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value

    def __repr__(self) -> str:
        return "none" if self.value is None else f"a {type(self.value).__name__}"


_GETTERS: dict[str, Callable[[], Any]] = {
    "default dtype": torch.get_default_dtype,
    "default device": torch.get_default_device,
    "deterministic algorithms": torch.get_deterministic_debug_mode,
    "filling of uninitialized memory": lambda: getattr(torch.utils.deterministic, "fill_uninitialized_memory"),  # noqa: B009
    "torch.backends.cudnn.benchmark": lambda: torch.backends.cudnn.benchmark,
    "torch.backends.cudnn.deterministic": lambda: torch.backends.cudnn.deterministic,
    "precision of float32 products": torch.get_float32_matmul_precision,
    "number of threads": torch.get_num_threads,
    "gradients enabled": torch.is_grad_enabled,
    "default process group": lambda: _Identity(dist.group.WORLD),
    "working directory": os.getcwd,
}

State = dict[str, Any]


class GlobalStateWarning(UserWarning):
    """A test left global state changed in a rank."""


def snapshot() -> State:
    """Read all state that this module watches."""
    environment = {
        f"os.environ[{name!r}]": value for name, value in os.environ.items() if not name.startswith(_SET_BY_TORCH)
    }
    return {**{name: get() for name, get in _GETTERS.items()}, **environment}


def changes_of_state(before: State, after: State) -> list[str]:
    """Describe each difference in one phrase."""
    names = [*before, *(name for name in after if name not in before)]
    return [
        f"{name}: {_show(before, name)} -> {_show(after, name)}"
        for name in names
        if before.get(name, _NOT_SET) != after.get(name, _NOT_SET)
    ]


_NOT_SET = object()


def _show(state: State, name: str) -> str:
    return repr(state[name]) if name in state else "not set"
