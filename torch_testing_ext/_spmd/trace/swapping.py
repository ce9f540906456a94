"""Temporary changes to model and optimizers during a trace."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from torch_testing_ext._torch.spmd import is_fake, tree

from ..spmd_errors import SPMDError
from .train_state import StepState

_tree = tree()
_REGISTRIES = ("_parameters", "_buffers", "_modules")


@contextlib.contextmanager
def restoring(state: StepState) -> Iterator[None]:
    """Restore model and optimizers after the trace, whether it succeeds or fails.

    A step that sets a tensor or a changing number as an attribute of a module would set it only once, during the
    trace. Such a step is refused, because the program would silently skip the assignment.
    """
    attributes = [dict(module.__dict__) for module in state.modules]
    registries = [[dict(getattr(module, name)) for name in _REGISTRIES] for module in state.modules]
    optimizers = [(optimizer.param_groups, optimizer.state) for optimizer in state.optimizers]
    changes: list[str] = []
    try:
        yield
        for module, name, before in zip(state.modules, state.module_names, attributes, strict=True):
            changes += [f"{name or type(module).__name__}.{key}" for key in _changed_attributes(module, before)]
    finally:
        for module, before, contents in zip(state.modules, attributes, registries, strict=True):
            for name, content in zip(_REGISTRIES, contents, strict=True):
                registry = getattr(module, name)
                registry.clear()
                registry.update(content)
            module.__dict__.clear()
            module.__dict__.update(before)
        for optimizer, (groups, states) in zip(state.optimizers, optimizers, strict=True):
            optimizer.param_groups, optimizer.state = groups, states
    if changes:
        raise SPMDError(
            f"The step sets {', '.join(changes)}. The traced program runs no Python code: it would be set only once.",
            remedy="Return the value from the step, or keep it in a registered buffer.",
        )


def _changed_attributes(module: nn.Module, before: dict[str, Any]) -> list[str]:
    found = []
    for key, value in module.__dict__.items():
        if key in _REGISTRIES or key == "_flat_weights" or value is before.get(key):
            continue
        plain = isinstance(value, (bool, int, float, str, torch.SymInt, torch.SymFloat))
        if (plain and not _equal(value, before.get(key))) or any(map(is_fake, _tree.tree_leaves(value))):
            found.append(key)
    return found


def _equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b)


@contextlib.contextmanager
def recurrent_without_mkldnn(state: StepState) -> Iterator[None]:
    """Disable mkldnn: its LSTM packs weights in a way that cannot be traced; the plain LSTM gives the same numbers.

    But not with dropout between its layers, which a trace draws in another order.
    """
    for module, name in zip(state.modules, state.module_names, strict=True):
        if isinstance(module, nn.RNNBase) and module.training and module.dropout and module.num_layers > 1:
            raise SPMDError(
                f"{name or type(module).__name__} has dropout between its layers, for which the traced program would "
                "draw other random numbers.",
                remedy="Use several recurrent modules of one layer, with nn.Dropout between them.",
            )
    if not any(isinstance(module, nn.RNNBase) for module in state.modules):
        yield
        return
    with torch.backends.mkldnn.flags(enabled=False):
        yield
