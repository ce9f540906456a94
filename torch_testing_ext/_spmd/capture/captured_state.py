"""The arguments and the state that a program works on, and the guards on them: all that it takes for granted."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torch_testing_ext._torch.spmd import calling_modes, disable_torch_function, gradient_hooks, local_tensor, tree

from ..engine.roster import ParamSlot, Roster
from ..engine.state_finder import FoundState
from ..param_layout import Layout
from ..spmd_errors import SPMDError

_tree = tree()
_PLAIN = (type(None), bool, int, float, str, bytes, complex, torch.dtype, torch.device)
_OF_TENSOR = attrgetter("shape", "dtype", "device", "requires_grad")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class CallArguments:
    """The arguments of one call, in the order of pytree's leaves."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], device: str, function: Any) -> None:
        self.args, self.kwargs = args, kwargs
        self.leaves, self._spec = _tree.tree_flatten((args, kwargs))
        key: list[Any] = [self._spec, getattr(function, "__code__", None), *map(_key_of, self.leaves)]
        if len({*map(id, self.leaves)}) != len(self.leaves):
            first: dict[int, int] = {}
            key.append(tuple([first.setdefault(id(leaf), i) for i, leaf in enumerate(self.leaves)]))
        self.signature = tuple(key), calling_modes(device)

    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    def rebuilt(self, leaves: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return _tree.tree_unflatten(leaves, self._spec)  # type: ignore[no-any-return]

    def admit(self) -> None:
        for leaf in self.tensors():
            plain = type(leaf) in (torch.Tensor, nn.Parameter) and leaf.layout is torch.strided
            if not plain or leaf.requires_grad or leaf.is_conj():
                kind = f"{type(leaf).__name__} of shape {tuple(leaf.shape)}, {leaf.layout}"
                what = f"A program cannot take an argument: {kind}, requires_grad={leaf.requires_grad}."
                raise SPMDError(what, remedy='Pass plain tensors without gradients, or drop backend="capture".')


def _key_of(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        strides = leaf.stride() if leaf.layout is torch.strided else leaf.layout
        return type(leaf), leaf.shape, strides, leaf.dtype, leaf.device, leaf.requires_grad
    if type(leaf) in _PLAIN:
        return type(leaf), leaf or str(leaf)  # zeros of both signs are equal
    return id(leaf)  # modules, optimizers, and opaque objects: programs keep them alive


@dataclass(frozen=True)
class InputSource:
    """The place that a graph input is read from at each call.

    kind: "param", "grad", "buffer" (index i), "state" (entry i, leaf j), "lr" (group i), "arg" (leaf i).
    """

    kind: str
    i: int
    j: int = 0


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
        self.found, self.roster = found, roster
        self.modules = [*dict.fromkeys(module for root in found.modules for module in root.modules())]
        self.rests = [managed.rest for managed in roster.params]
        self.layouts = [
            Layout(managed.layout.shape, managed.sharded and world > 1, managed.layout.rank, world)
            for managed in roster.params
        ]
        self.index = {id(rest): i for i, rest in enumerate(self.rests)}
        self.buffers = [*{id(slot.value): slot.value for slot in self.slots("_buffers")}.values()]
        self.groups = [group for optimizer in found.optimizers for group in optimizer.param_groups]
        self.entries = [*self._entries()]
        self.guards = _StateGuards(self)

    def _entries(self) -> Iterator[StateEntry]:
        for i, optimizer in enumerate(self.found.optimizers):
            for key, value in optimizer.state.items():
                leaves, spec = _tree.tree_flatten(value)
                yield StateEntry(i, self.index.get(id(key)), key, leaves, spec)

    def slots(self, registry: str) -> Iterator[ParamSlot]:
        for module in self.modules:
            for name, value in list(getattr(module, registry).items()):
                if value is not None:
                    yield ParamSlot(module, name, value)

    def key(self) -> tuple[Any, ...]:
        """Everything that distinguishes programs, other than the call's own arguments."""
        kinds = [
            [(v.shape, v.dtype, v.device) if isinstance(v, torch.Tensor) else v for v in e.leaves] for e in self.entries
        ]
        entries = [(e.optimizer, e.owner, e.spec, kind) for e, kind in zip(self.entries, kinds, strict=True)]
        params = [[self.index.get(id(param)) for param in group["params"]] for group in self.groups]
        strides = [local_part(tensor).stride() for tensor in (*self.rests, *self.buffers)]
        owners = (*map(id, self.modules), *map(id, self.found.optimizers))
        return repr(self.guards.settings), repr(entries), repr(params), repr(strides), owners

    def present_grads(self) -> list[bool]:
        with disable_torch_function():
            return [rest.grad is not None for rest in self.rests]

    def sources(self, leaves: list[Any]) -> Iterator[InputSource]:
        """The inputs of a program. Parameters come first."""
        yield from (InputSource("param", i) for i in range(len(self.rests)))
        yield from (InputSource("grad", i) for i, present in enumerate(self.present_grads()) if present)
        for e, entry in enumerate(self.entries):
            yield from (InputSource("state", e, j) for j, v in enumerate(entry.leaves) if isinstance(v, torch.Tensor))
        yield from (InputSource("buffer", i) for i in range(len(self.buffers)))
        yield from (InputSource("lr", i) for i, group in enumerate(self.groups) if _lifts_rate(group))
        first: dict[int, int] = {}
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and first.setdefault(id(leaf), i) == i:
                yield InputSource("arg", i)

    def object(self, source: InputSource, leaves: list[Any]) -> Any:
        if source.kind == "arg":
            return leaves[source.i]
        if source.kind == "lr":
            return self.groups[source.i]["lr"]
        if source.kind == "buffer":
            return self.buffers[source.i]
        if source.kind == "state":
            return self.entries[source.i].leaves[source.j]
        return self.rests[source.i].grad if source.kind == "grad" else self.rests[source.i]

    def value(self, source: InputSource, leaves: list[Any]) -> Any:
        """The value of a graph input. Fused operations take no symbols, and so get a learning rate as a tensor."""
        found = self.object(source, leaves)
        if source.kind == "lr" and isinstance(found, float) and self.groups[source.i].get("fused"):
            return torch.tensor(found, dtype=torch.float64)
        return local_part(found)


class _StateGuards:
    """Everything that a program takes for granted of its state, as it was."""

    def __init__(self, state: CapturedState) -> None:
        self._state = state
        registries = [r for module in state.modules for r in (module._parameters, module._buffers, module._modules)]
        self._registries, self._empty = [r for r in registries if r], [r for r in registries if not r]
        self._hooks = [getattr(module, name) for module in state.modules for name in _HOOKS]
        self._objects, self.settings = self._collect_objects(), self._collect_settings()

    def is_current(self) -> bool:
        try:
            objects = self._collect_objects()
            same = len(objects) == len(self._objects) and all(map(is_, objects, self._objects))
            return same and not any(self._empty) and self._collect_settings() == self.settings
        except (KeyError, ValueError, RuntimeError, AttributeError):  # a setting is gone, or has become a tensor
            return False

    def _collect_objects(self) -> list[Any]:
        """Everything that a program depends on by identity. The list keeps it alive."""
        found: list[Any] = []
        for registry in self._registries:
            found += registry.values()
        for optimizer in self._state.found.optimizers:
            found += optimizer.param_groups
            for value in optimizer.state.values():
                found += value.values() if type(value) is dict else _tree.tree_leaves(value)
        for group in self._state.groups:
            found += group["params"]
        found += [local_tensor(value) for value in found if isinstance(value, DTensor)]
        return found

    def _collect_settings(self) -> list[Any]:
        """Everything that a program depends on by value."""
        found: list[Any] = [
            (m.training, m.__class__, getattr(m.forward, "__code__", None)) for m in self._state.modules
        ]
        found += map(len, self._hooks)
        with disable_torch_function():  # which looks at each attribute of a DTensor, at three times the cost
            found += map(_OF_TENSOR, self._state.rests)
            found += map(_OF_TENSOR, self._state.buffers)
            found += map(gradient_hooks, self._state.rests)
        for group in self._state.groups:
            settings = [(name, value) for name, value in group.items() if name != "params" and name != "lr"]
            found.append([(n, copy.deepcopy(v) if isinstance(v, (list, dict)) else v) for n, v in settings])
            found.append(type(group.get("lr")) if _lifts_rate(group) else group.get("lr"))
        return found


def local_part(value: Any) -> Any:
    """The local tensor of a DTensor; any other value itself."""
    return local_tensor(value) if isinstance(value, DTensor) else value


def _lifts_rate(group: dict[str, Any]) -> bool:
    """Whether the learning rate of a group is an input of programs, and not a setting."""
    return isinstance(group.get("lr"), (float, torch.Tensor))
