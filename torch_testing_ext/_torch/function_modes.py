"""The modes of torch that see its functions."""

from typing import Any

import torch


def torch_function_modes() -> int:
    """Count the active torch function modes (a default device is one). `_len_torch_function_stack`: 2.11 to 2.15."""
    return torch._C._len_torch_function_stack()


def pop_torch_function_mode() -> None:
    """Remove the innermost torch function mode. `_pop_torch_function_stack`: 2.11 to 2.15."""
    torch._C._pop_torch_function_stack()


def torch_function_state() -> Any:
    """Whether `__torch_function__` is enabled. `_get_torch_function_state`: 2.11 to 2.15."""
    return torch._C._get_torch_function_state()  # type: ignore[attr-defined, unused-ignore]


def set_torch_function_state(state: Any) -> None:
    """Restore a result of `torch_function_state`. `_set_torch_function_state`: 2.11 to 2.15."""
    torch._C._set_torch_function_state(state)  # type: ignore[attr-defined, unused-ignore]
