"""Bindings: the current state of a model and its optimizers, with a fast check that it is still current.

Anything may happen between two calls: weights are loaded, a learning rate changes, a layer is frozen. The binding
lists every object that the program depends on; each call builds this list again and compares identities.
"""

from __future__ import annotations

from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torch_testing_ext._torch.spmd import disable_torch_function, local_tensor, tree

from ..param_layout import Layout
from ..trace.call_arguments import is_plain
from ..trace.tracing import InputSource
from ..trace.train_state import StateEntry, StepState

_tree = tree()
_TRAINING = attrgetter("training")
_BUFFER_FORM = attrgetter("shape", "dtype", "requires_grad")
_PARAM_SETTINGS = [*map(attrgetter, ("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks"))]


class Binding:
    """The objects and settings of a model and its optimizers that a program depends on."""

    def __init__(self, state: StepState, layouts: list[Layout]) -> None:
        self.state, self.layouts = state, layouts
        self.entries: list[StateEntry] = state.optimizer_states()
        registries = [r for module in state.modules for r in (module._parameters, module._buffers, module._modules)]
        self.registries = [registry for registry in registries if registry]
        self.empty = [registry for registry in registries if not registry]
        self.buffers = [ref.value for ref in state.buffers]
        self.params: list[Any] = [ref.value for ref in state.params]
        self.nested = any(map(_is_nested, (entry.value for entry in self.entries)))
        self.groups = [group for optimizer in state.optimizers for group in optimizer.param_groups]
        plain = [[n for n in _hyperparameter_names(group) if is_plain(group[n])] for group in self.groups]
        self.hyperparameter_getters = [itemgetter(*names) if names else len for names in plain]
        self.others = [  # settings that may change in place, such as lists and tensors
            (group, name)
            for group, names in zip(self.groups, plain, strict=True)
            for name in _hyperparameter_names(group)
            if name not in names
        ]
        self.dtensors = self._dtensors()
        # Both lists of objects keep them alive, so that no other object can get their ids.
        self.objects = self._collect_objects()
        self.local_tensors = [local_tensor(d) for d in self.dtensors]
        self.settings = self._collect_settings()

    def _dtensors(self) -> list[Any]:
        states = [leaf for entry in self.entries for leaf in entry.leaves if isinstance(leaf, DTensor)]
        return [*(p for p in self.params if isinstance(p, DTensor)), *states]

    def is_current(self) -> bool:
        """Whether model and optimizers still have the objects and settings of this binding."""
        return (
            not any(self.empty)
            and _same(self._collect_objects(), self.objects)
            and _same([*map(local_tensor, self.dtensors)], self.local_tensors)
            and self._same_settings()
        )

    def _same_settings(self) -> bool:
        try:
            return self._collect_settings() == self.settings
        except (KeyError, ValueError, RuntimeError):  # a setting is gone, or has become an array or a tensor
            return False

    def _collect_objects(self) -> list[Any]:
        """Every object that the program depends on by identity."""
        found: list[Any] = []
        for registry in self.registries:
            found += registry.values()
        for optimizer in self.state.optimizers:
            found += optimizer.param_groups
            for value in optimizer.state.values():
                found.append(value)
                found += _tree.tree_leaves(value) if self.nested else value.values()
        for group in self.groups:
            found += group["params"]
        found += [group.get(name) for group, name in self.others]
        return found

    def _collect_settings(self) -> list[Any]:
        """Everything that the program depends on by value."""
        found: list[Any] = [*map(_TRAINING, self.state.modules)]
        with disable_torch_function():  # which looks at each attribute of a DTensor, at three times the cost
            for setting in _PARAM_SETTINGS:
                found += map(setting, self.params)
            found += map(_BUFFER_FORM, self.buffers)
        found += map(len, self.groups)
        found += [type(group.get("lr")) for group in self.groups]
        found += [get(group) for get, group in zip(self.hyperparameter_getters, self.groups, strict=True)]
        return found

    def key(self) -> tuple[Any, ...]:
        """Everything that distinguishes programs, other than the call's own arguments."""
        params = tuple(
            (
                tuple(p.shape),
                local_tensor(p).stride() if isinstance(p, DTensor) else p.stride(),
                p.dtype,
                p.device,
                p.requires_grad,
            )
            for p in self.params
        )
        buffers = tuple(
            (tuple(b.value.shape), b.value.dtype, b.value.device, b.value.stride()) for b in self.state.buffers
        )
        slots = tuple((id(slot.module), slot.name, i) for i, ref in enumerate(self.state.params) for slot in ref.slots)
        groups = tuple(
            (
                tuple(self.state.index_of(p) for p in group["params"]),
                _hashable(_comparable(group)),
                type(group.get("lr")),
            )
            for group in self.groups
        )
        modules = tuple((id(module), type(module), module.training) for module in self.state.modules)
        states = _hashable([entry.structure for entry in self.entries])
        return params, buffers, slots, groups, modules, states

    def value_of(self, source: InputSource) -> Any:
        """The value of a graph input that belongs to the model or an optimizer."""
        if source.kind == "param":
            return local_tensor(self.params[source.i])
        if source.kind == "buffer":
            return self.state.buffers[source.i].value
        leaf = self.entries[source.i].leaves[source.j]
        return local_tensor(leaf) if isinstance(leaf, DTensor) else leaf


def _same(found: list[Any], expected: list[Any]) -> bool:
    return len(found) == len(expected) and all(map(is_, found, expected))


def _hyperparameter_names(group: dict[str, Any]) -> list[str]:
    return [
        name
        for name in group
        if name != "params" and not (name == "lr" and isinstance(group[name], (float, torch.Tensor)))
    ]


def _comparable(group: dict[str, Any]) -> dict[str, Any]:
    """The settings of a group, by value; those that may change in place, which guards compare, by identity."""
    return {n: group[n] if is_plain(group[n]) else id(group[n]) for n in _hyperparameter_names(group)}


def _is_nested(value: Any) -> bool:
    return type(value) is not dict or any(isinstance(item, (dict, list, tuple)) for item in value.values())


def _hashable(value: Any) -> Any:
    """`value` as an object that supports comparison and hashing."""
    if isinstance(value, dict):
        return tuple((key, _hashable(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_hashable, value))
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.dtype, value.device, id(value))
    try:
        hash(value)
    except TypeError:
        return id(value)
    return (type(value).__name__, value)
