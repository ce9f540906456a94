"""The state that a program works on, as lists, and the guards on it: everything that a program takes for granted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torch_testing_ext._torch.spmd import disable_torch_function, local_tensor, tree

from ..engine.managed_params import ManagedParam
from ..engine.roster import Roster, slot_names
from ..engine.state_finder import FoundState
from ..param_layout import Layout

_tree = tree()
_OF_TENSOR = attrgetter("shape", "dtype", "device", "requires_grad", "_backward_hooks")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass
class StateEntry:
    """The value under one key of an optimizer's state, flattened."""

    optimizer: int
    owner: int | None  # the index of the parameter, or None if the key is not a parameter
    key: Any
    leaves: list[Any]
    spec: Any


class CapturedState:
    """The parameters, buffers and optimizers that a call found, in an order that is the same on every rank."""

    def __init__(self, found: FoundState, roster: Roster, world: int) -> None:
        self.found, self.roster, self.optimizers = found, roster, found.optimizers
        self.params: list[ManagedParam] = roster.params
        self.modules = [*dict.fromkeys(module for root in found.modules for module in root.modules())]
        self.rests = [managed.rest for managed in self.params]
        self.names = [managed.name for managed in self.params]
        self.layouts = [
            Layout(managed.layout.shape, managed.sharded and world > 1, managed.layout.rank, world)
            for managed in self.params
        ]
        self.index = {id(rest): i for i, rest in enumerate(self.rests)}
        self.buffers = [*{id(b): b for module in self.modules for b in module._buffers.values() if b is not None}.values()]
        names = {id(tensor): name for name, tensor in slot_names(found.modules)}
        self.buffer_names = [names.get(id(buffer), "a buffer") for buffer in self.buffers]
        self.groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        self.entries = [entry for i in range(len(self.optimizers)) for entry in self._entries_of(i)]
        registries = [r for module in self.modules for r in (module._parameters, module._buffers, module._modules)]
        self._registries, self._empty = [r for r in registries if r], [r for r in registries if not r]
        self._hooks = [getattr(module, name) for module in self.modules for name in _HOOKS]
        self._objects = self._collect_objects()
        self._settings = self._collect_settings()

    def _entries_of(self, i: int) -> Iterator[StateEntry]:
        for key, value in self.optimizers[i].state.items():
            leaves, spec = _tree.tree_flatten(value)
            yield StateEntry(i, self.index.get(id(key)), key, leaves, spec)

    # -- guards

    def is_current(self) -> bool:
        """Whether model and optimizers still have these objects and settings."""
        try:
            objects = self._collect_objects()
            same = len(objects) == len(self._objects) and all(map(is_, objects, self._objects))
            return same and not any(self._empty) and self._collect_settings() == self._settings
        except (KeyError, ValueError, RuntimeError, AttributeError):  # a setting is gone, or has become a tensor
            return False

    def _collect_objects(self) -> list[Any]:
        """Everything that a program depends on by identity. The list keeps it alive."""
        found: list[Any] = []
        for registry in self._registries:
            found += registry.values()
        for optimizer in self.optimizers:
            found += optimizer.param_groups
            for value in optimizer.state.values():
                found += value.values() if type(value) is dict else _tree.tree_leaves(value)
        for group in self.groups:
            found += group["params"]
        found += [local_tensor(value) for value in found if isinstance(value, DTensor)]
        return found

    def _collect_settings(self) -> list[Any]:
        """Everything that a program depends on by value."""
        found: list[Any] = [
            (module.training, module.__class__, getattr(module.forward, "__code__", None)) for module in self.modules
        ]
        found += map(len, self._hooks)
        with disable_torch_function():  # which looks at each attribute of a DTensor, at three times the cost
            found += map(_OF_TENSOR, self.rests)
            found += map(_OF_TENSOR, self.buffers)
        found += [_settings_of(group) for group in self.groups]
        return found

    def key(self) -> tuple[Any, ...]:
        """Everything that distinguishes programs, other than the call's own arguments."""
        entries = [(e.optimizer, e.owner, e.spec, [*map(_kind, e.leaves)]) for e in self.entries]
        params = [[self.index.get(id(param)) for param in group["params"]] for group in self.groups]
        strides = [local_tensor(r).stride() if isinstance(r, DTensor) else r.stride() for r in (*self.rests, *self.buffers)]
        ids = [*map(id, self.modules), *map(id, self.optimizers)]
        return (repr(self._settings), repr(entries), repr(params), repr(strides), tuple(ids))

    def present_grads(self) -> list[bool]:
        """For each parameter, whether it has a gradient."""
        with disable_torch_function():
            return [rest.grad is not None for rest in self.rests]

    # -- values

    def local(self, i: int) -> torch.Tensor:
        """This rank's part of a parameter."""
        rest = self.rests[i]
        return local_tensor(rest) if isinstance(rest, DTensor) else rest

    def slots(self, registry: str) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
        """All places where modules hold parameters or buffers."""
        for module in self.modules:
            for name, value in list(getattr(module, registry).items()):
                if value is not None:
                    yield module, name, value


def local_part(value: Any) -> Any:
    """The local tensor of a DTensor; any other value itself."""
    return local_tensor(value) if isinstance(value, DTensor) else value


def lifts_rate(group: dict[str, Any]) -> bool:
    """Whether the learning rate of a group is an input of programs, and not a setting."""
    return isinstance(group.get("lr"), (float, torch.Tensor))


def _settings_of(group: dict[str, Any]) -> list[Any]:
    found = [(name, value) for name, value in group.items() if name != "params" and name != "lr"]
    return [*found, type(group.get("lr")) if lifts_rate(group) else group.get("lr")]


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.device, isinstance(leaf, DTensor)
    return leaf
