"""A model and its optimizers as they are right now, and a quick look whether they still are.

Between two calls anything may have happened: weights loaded, a learning rate changed, a layer frozen. The binding
keeps every object the program depends on, in one list; a call makes the same list again and compares identities.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torch_testing_ext._torch import local_tensor, tree

from ..layout import Layout
from ..trace.state import StateEntry, StepState
from ..trace.tracing import Source

_tree = tree()


class Binding:
    def __init__(self, state: StepState, layouts: list[Layout]) -> None:
        self.state, self.layouts = state, layouts
        self.entries: list[StateEntry] = state.optimizer_states()
        self.slots = [
            (registry(slot.module), slot.name)
            for held_list, registry in ((state.params, _parameters), (state.buffers, _buffers))
            for held in held_list
            for slot in held.slots
        ]
        self.params: list[Any] = [held.value for held in state.params]
        self.nested = any(map(_is_nested, (entry.value for entry in self.entries)))
        self.groups = [group for optimizer in state.optimizers for group in optimizer.param_groups]
        self.hyper = [itemgetter(*names) if (names := _hyper_names(group)) else len for group in self.groups]
        self.dtensors = self._dtensors()
        self.objects = self._look()
        self.ids = [*map(id, self.objects)]
        self.values = self._look_at_values()
        self.local_ids = [id(local_tensor(d)) for d in self.dtensors]
        self.locals = [local_tensor(d) for d in self.dtensors]

    def _dtensors(self) -> list[Any]:
        states = [leaf for entry in self.entries for leaf in entry.leaves if isinstance(leaf, DTensor)]
        return [*(p for p in self.params if isinstance(p, DTensor)), *states]

    def is_current(self) -> bool:
        return (
            [*map(id, self._look())] == self.ids
            and [id(local_tensor(d)) for d in self.dtensors] == self.local_ids
            and self._look_at_values() == self.values
        )

    def _look(self) -> list[Any]:
        """Every object that must be the same one as before."""
        found = [registry.get(name) for registry, name in self.slots]
        for optimizer in self.state.optimizers:
            found += optimizer.param_groups
            for value in optimizer.state.values():
                found.append(value)
                found += _tree.tree_leaves(value) if self.nested else value.values()
        for group in self.groups:
            found += group["params"]
        for module in self.state.modules:
            if module._modules:
                found += module._modules.values()
        return found

    def _look_at_values(self) -> list[Any]:
        """Everything else that is written into a program."""
        found: list[Any] = [module.training for module in self.state.modules]
        found += [param.requires_grad for param in self.params]
        found += [get(group) for get, group in zip(self.hyper, self.groups, strict=True)]
        return found

    def key(self) -> tuple[Any, ...]:
        """What programs are told apart by, besides the call's own arguments."""
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
        slots = tuple(
            (id(slot.module), slot.name, i) for i, held in enumerate(self.state.params) for slot in held.slots
        )
        groups = tuple(
            (
                tuple(self.state.index_of(p) for p in group["params"]),
                _frozen({k: group[k] for k in _hyper_names(group)}),
                type(group.get("lr")),
            )
            for group in self.groups
        )
        training = tuple(module.training for module in self.state.modules)
        states = _frozen([entry.structure for entry in self.entries])
        return params, buffers, slots, groups, training, states

    def value_of(self, source: Source) -> Any:
        """The value of a graph input that belongs to the model or an optimizer."""
        if source.kind == "param":
            return local_tensor(self.params[source.i])
        if source.kind == "buffer":
            return self.state.buffers[source.i].value
        leaf = self.entries[source.i].leaves[source.j]
        return local_tensor(leaf) if isinstance(leaf, DTensor) else leaf


def _hyper_names(group: dict[str, Any]) -> list[str]:
    return [
        name
        for name in group
        if name != "params" and not (name == "lr" and isinstance(group[name], (float, torch.Tensor)))
    ]


def _is_nested(value: Any) -> bool:
    return type(value) is not dict or any(isinstance(item, (dict, list, tuple)) for item in value.values())


def _parameters(module: nn.Module) -> dict[str, Any]:
    return module._parameters


def _buffers(module: nn.Module) -> dict[str, Any]:
    return module._buffers


def _frozen(value: Any) -> Any:
    """`value` as something that can be compared and hashed."""
    if isinstance(value, dict):
        return tuple((key, _frozen(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.dtype, value.device, id(value))
    try:
        hash(value)
    except TypeError:
        return id(value)
    return (type(value).__name__, value)
