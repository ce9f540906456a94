"""Global state that a test may leave behind."""

from __future__ import annotations

from typing import Any

import torch


def torch_function_modes() -> int:
    """How many torch function modes are on (a default device is one). `_len_torch_function_stack`: 2.11 to 2.15."""

    return torch._C._len_torch_function_stack()


def pop_torch_function_mode() -> None:
    """Take the innermost torch function mode off. `_pop_torch_function_stack`: 2.11 to 2.15."""

    torch._C._pop_torch_function_stack()


def torch_function_state() -> Any:
    """Is `__torch_function__` enabled? `_get_torch_function_state`: 2.11 to 2.15."""

    return torch._C._get_torch_function_state()  # type: ignore[attr-defined]


def set_torch_function_state(state: Any) -> None:
    """Put back what `torch_function_state` gave. `_set_torch_function_state`: 2.11 to 2.15."""

    torch._C._set_torch_function_state(state)  # type: ignore[attr-defined]
