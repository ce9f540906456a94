"""What of a process a test may leave changed for those that come after it, where a process has several.

Random state is not among it: every test uses some, and every test begins with the same seeds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

# What torch itself sets when it first compiles something.
_TORCHS_OWN = ("TORCHINDUCTOR_", "TRITON_", "KINETO_")


@dataclass(frozen=True)
class _Itself:
    """A thing that is the same only as itself, and whose address is nobody's concern."""

    thing: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.thing is other.thing

    def __repr__(self) -> str:
        return "none" if self.thing is None else f"a {type(self.thing).__name__}"


_LOOKS: dict[str, Callable[[], Any]] = {
    "default dtype": torch.get_default_dtype,
    "default device": torch.get_default_device,
    "deterministic algorithms": torch.get_deterministic_debug_mode,
    "filling of uninitialized memory": lambda: getattr(torch.utils.deterministic, "fill_uninitialized_memory"),  # noqa: B009
    "torch.backends.cudnn.benchmark": lambda: torch.backends.cudnn.benchmark,
    "torch.backends.cudnn.deterministic": lambda: torch.backends.cudnn.deterministic,
    "precision of float32 products": torch.get_float32_matmul_precision,
    "number of threads": torch.get_num_threads,
    "gradients enabled": torch.is_grad_enabled,
    "default process group": lambda: _Itself(dist.group.WORLD),
    "working directory": os.getcwd,
}

State = dict[str, Any]


class GlobalStateWarning(UserWarning):
    """A test has left global state changed in its rank."""


def look() -> State:
    environment = {f"os.environ[{name!r}]": value for name, value in os.environ.items() if _is_ours(name)}
    return {**{name: get() for name, get in _LOOKS.items()}, **environment}


def _is_ours(name: str) -> bool:
    return not name.startswith(_TORCHS_OWN)


def changes(before: State, after: State) -> list[str]:
    """What differs, one sentence each."""
    names = [*before, *(name for name in after if name not in before)]
    return [
        f"{name}: {_show(before, name)} -> {_show(after, name)}"
        for name in names
        if before.get(name, _NOT_SET) != after.get(name, _NOT_SET)
    ]


_NOT_SET = object()


def _show(state: State, name: str) -> str:
    return repr(state[name]) if name in state else "not set"
