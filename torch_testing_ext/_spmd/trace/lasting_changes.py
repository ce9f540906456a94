"""Refusal of changes by a step that later calls of its program could not repeat: in arguments, modules, optimizers."""

from __future__ import annotations

from typing import Any

import torch

from torch_testing_ext._torch.spmd import disable_torch_function, storage_key

from ..spmd_errors import SPMDError
from .call_arguments import flatten_arguments
from .train_state import StateEntry, StepState, TensorRef


def structure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """The leaves of arguments, and their shape."""
    leaves: list[Any] = []
    shape: list[Any] = []
    flatten_arguments((args, kwargs), leaves, shape)
    return leaves, shape


def refuse_changed_arguments(before: tuple[list[Any], list[Any]], after: tuple[list[Any], list[Any]]) -> None:
    """Refuse a step that changes the containers it gets. Both are a `structure`."""
    same = before[1] == after[1] and all(a is b for a, b in zip(before[0], after[0], strict=True))
    if not same:
        raise SPMDError(
            "The step changes a list, dict or object that it gets as an argument. The traced program runs no Python "
            "code, and would leave it as it is.",
            remedy="Change a copy: batch = dict(batch).",
        )


def write_counts(fakes: list[torch.Tensor]) -> list[int]:
    """The number of writes to each tensor."""
    with disable_torch_function():
        return [fake._version for fake in fakes]


def refuse_changed_forms(tensors: list[tuple[str, torch.Tensor, torch.Tensor]]) -> None:
    """Refuse a step that changes the shapes of the model's tensors, or lets inputs require gradients.

    tensors: the kind of each ("param", "grad", "buffer", "arg"), its fake, and the real one.
    """
    for kind, fake, real in tensors:
        if kind == "arg" and fake.requires_grad and not real.requires_grad:
            raise SPMDError(
                f"The step makes an input of shape {tuple(real.shape)} require a gradient, and leaves it so.",
                remedy="Do that to another tensor: x = x.detach().requires_grad_().",
            )
        if kind != "arg" and fake.shape != real.shape:
            raise SPMDError(
                f"The step changes the shape of a {kind} from {tuple(real.shape)} to {tuple(fake.shape)}.",
                remedy="Compute with a view or a copy of the other shape.",
            )


def refuse_shared_inputs(leaves: list[Any], owned: frozenset[int]) -> None:
    """Refuse inputs in memory of the model, its gradients or its optimizers. `owned`: the storages of these."""
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and storage_key(leaf) in owned:
            raise SPMDError(
                f"An input of shape {tuple(leaf.shape)} shares the memory of a parameter, gradient, buffer or state.",
                remedy="Get it in the step, from the model or optimizer; or pass a copy: tensor.clone().",
            )


def refuse_rebound_parameters(state: StepState, fakes: list[torch.Tensor]) -> None:
    """Refuse a step that replaces parameters. `fakes`: those that the modules held when it began."""
    for i, ref in enumerate(state.params):
        for slot in ref.slots:
            if slot.module._parameters.get(slot.name) is not fakes[i]:
                raise SPMDError(
                    f"The step replaces the parameter {ref.name} with another object.",
                    remedy="Change parameters in place under torch.no_grad(), or outside of the step.",
                )


def refuse_new_buffers(state: StepState) -> None:
    """Refuse a step that creates buffers."""
    known = {(id(slot.module), slot.name) for ref in state.buffers for slot in ref.slots}
    for module in state.modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and (id(module), name) not in known:
                raise SPMDError(
                    f"The step creates the buffer {name} of {type(module).__name__}.",
                    remedy="Create it before the first call, and write to it in the step.",
                )


def refuse_changed_requirement(ref: TensorRef, fake: torch.Tensor) -> None:
    """Refuse a step that freezes or unfreezes a parameter."""
    with disable_torch_function():
        required = ref.value.requires_grad
    if fake.requires_grad != required:
        raise SPMDError(
            f"The step leaves {ref.name} with requires_grad={fake.requires_grad}, and began with {required}.",
            remedy="Set it back at the end of the step, or change it outside of the step.",
        )


def refuse_changed_groups(optimizer: torch.optim.Optimizer, before: list[dict[str, Any]]) -> None:
    """Refuse a step that changes an optimizer's groups."""
    for old, new in zip(before, optimizer.param_groups, strict=False):
        changed = [key for key in new if new[key] is not old.get(key)]
        if changed or len(before) != len(optimizer.param_groups):
            raise SPMDError(
                f"The step changes {', '.join(changed) or 'the groups'} in {type(optimizer).__name__}.param_groups.",
                remedy="Change them outside of the step; call the scheduler after it.",
            )


def refuse_python_counter(state: StepState, entry: StateEntry, j: int, before: Any, now: Any) -> None:
    """Refuse an optimizer that counts in Python."""
    if type(before) is not type(now) or (before is not now and before != now):
        kind = type(state.optimizers[entry.optimizer]).__name__
        raise SPMDError(
            f"{kind} keeps a Python value in its state that changes in each step ({entry.names[j]}: "
            f"{before} to {now}).",
            remedy="Keep it in a 0-d tensor, as torch's own optimizers do with their step count.",
        )
