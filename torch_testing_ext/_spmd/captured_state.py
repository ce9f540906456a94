"""The arguments and the state that a captured program works on: guards, and enrolment with the engine."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torch_testing_ext._torch.tracing import (
    calling_modes,
    disable_torch_function,
    gradient_hooks,
    local_tensor,
    tree,
)

from .gradient_buckets import forget_parameter, managed_by
from .parallel_modes import DataParallel, Layout, SPMDError
from .resting_state import shard_states, why_whole
from .resting_tensor import put_back_plain
from .roster import FoundState, ParamSlot, Roster, StateSnapshot
from .state_engine import StateEngine, StepHistory

# --------------------------------------------------------------------------------------------------------------------
# The arguments and the state that a program works on, and the guards on them: all that it takes for granted.

_tree = tree()
_PLAIN = (type(None), bool, int, float, str, bytes, complex, torch.dtype, torch.device)
_OF_TENSOR = attrgetter("shape", "dtype", "device", "requires_grad")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class CallArguments:
    """The arguments of one call, in the order of pytree's leaves."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], device: str, function: Any) -> None:
        self.args = args
        self.kwargs = kwargs
        self.leaves, self._spec = _tree.tree_flatten((args, kwargs))
        key: list[Any] = [self._spec, getattr(function, "__code__", None), *map(_key_of, self.leaves)]
        identities = [id(leaf) for leaf in self.leaves]
        if len(set(identities)) != len(identities):
            # Which leaves are the same object.
            first: dict[int, int] = {}
            key.append(tuple([first.setdefault(identity, number) for number, identity in enumerate(identities)]))
        self.signature = tuple(key), calling_modes(device)

    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    def rebuilt(self, leaves: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return _tree.tree_unflatten(leaves, self._spec)  # type: ignore[no-any-return]

    def admit(self) -> None:
        """Raise an error if a program cannot take the arguments."""
        for leaf in self.tensors():
            is_plain = type(leaf) in (torch.Tensor, nn.Parameter) and leaf.layout is torch.strided
            if is_plain and not leaf.requires_grad and not leaf.is_conj():
                continue
            kind = f"{type(leaf).__name__} of shape {tuple(leaf.shape)}, {leaf.layout}"
            raise SPMDError(
                f"A program cannot take an argument: {kind}, requires_grad={leaf.requires_grad}.",
                remedy='Pass plain tensors without gradients, or drop backend="capture".',
            )


def _key_of(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        strides = leaf.stride() if leaf.layout is torch.strided else leaf.layout
        return type(leaf), leaf.shape, strides, leaf.dtype, leaf.device, leaf.requires_grad
    if type(leaf) in _PLAIN:
        # Zeros of both signs are equal.
        return type(leaf), leaf or str(leaf)
    # Modules, optimizers, and opaque objects: programs keep them alive.
    return id(leaf)


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
    # The index of the parameter, or None if the key is not a parameter.
    owner: int | None
    key: Any
    leaves: list[Any]
    spec: Any

    def key_of_program(self) -> tuple[Any, ...]:
        """The part of it that distinguishes programs: of tensors, all but the values."""
        kinds = []
        for leaf in self.leaves:
            is_tensor = isinstance(leaf, torch.Tensor)
            kinds.append((leaf.shape, leaf.dtype, leaf.device) if is_tensor else leaf)
        return self.optimizer, self.owner, self.spec, kinds


class CapturedState:
    """The parameters, buffers and optimizers that a call found, in an order that is the same on every rank."""

    def __init__(self, found: FoundState, roster: Roster, world: int) -> None:
        self.found = found
        self.roster = roster
        self.modules = list(dict.fromkeys(module for root in found.modules for module in root.modules()))
        self.rests = [managed.rest for managed in roster.params]
        self.layouts = []
        for managed in roster.params:
            layout = managed.layout
            self.layouts.append(Layout(layout.shape, managed.sharded and world > 1, layout.rank, world))
        self.index = {id(rest): number for number, rest in enumerate(self.rests)}
        buffers = {id(slot.value): slot.value for slot in self.slots("_buffers")}
        self.buffers = list(buffers.values())
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
        entries = [entry.key_of_program() for entry in self.entries]
        params = [[self.index.get(id(param)) for param in group["params"]] for group in self.groups]
        strides = [local_part(tensor).stride() for tensor in (*self.rests, *self.buffers)]
        owners = (*map(id, self.modules), *map(id, self.found.optimizers))
        return repr(self.guards.settings), repr(entries), repr(params), repr(strides), owners

    def present_grads(self) -> list[bool]:
        with disable_torch_function():
            return [rest.grad is not None for rest in self.rests]

    def sources(self, leaves: list[Any]) -> Iterator[InputSource]:
        """The inputs of a program. Parameters come first."""
        for number in range(len(self.rests)):
            yield InputSource("param", number)
        for number, is_present in enumerate(self.present_grads()):
            if is_present:
                yield InputSource("grad", number)
        for number, entry in enumerate(self.entries):
            for position, leaf in enumerate(entry.leaves):
                if isinstance(leaf, torch.Tensor):
                    yield InputSource("state", number, position)
        for number in range(len(self.buffers)):
            yield InputSource("buffer", number)
        for number, group in enumerate(self.groups):
            if _lifts_rate(group):
                yield InputSource("lr", number)
        known: set[int] = set()
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in known:
                known.add(id(leaf))
                yield InputSource("arg", number)

    def object(self, source: InputSource, leaves: list[Any]) -> Any:
        """The object at the place of a graph input."""
        if source.kind == "arg":
            return leaves[source.i]
        if source.kind == "lr":
            return self.groups[source.i]["lr"]
        if source.kind == "buffer":
            return self.buffers[source.i]
        if source.kind == "state":
            return self.entries[source.i].leaves[source.j]
        if source.kind == "grad":
            return self.rests[source.i].grad
        return self.rests[source.i]

    def value(self, source: InputSource, leaves: list[Any]) -> Any:
        """The value of a graph input. Fused operations take no symbols, and so get a learning rate as a tensor."""
        value = self.object(source, leaves)
        if source.kind == "lr" and isinstance(value, float) and self.groups[source.i].get("fused"):
            return torch.tensor(value, dtype=torch.float64)
        return local_part(value)


class _StateGuards:
    """Everything that a program takes for granted of its state, as it was."""

    def __init__(self, state: CapturedState) -> None:
        self._state = state
        registries: list[dict[str, Any]] = []
        for module in state.modules:
            registries += [module._parameters, module._buffers, module._modules]
        self._registries = [registry for registry in registries if registry]
        self._empty = [registry for registry in registries if not registry]
        self._hooks = [getattr(module, name) for module in state.modules for name in _HOOKS]
        self._objects = self._collect_objects()
        self.settings = self._collect_settings()

    def is_current(self) -> bool:
        """Is everything still as it was?"""
        try:
            objects = self._collect_objects()
            if len(objects) != len(self._objects) or not all(map(is_, objects, self._objects)):
                return False
            return not any(self._empty) and self._collect_settings() == self.settings
        except (KeyError, ValueError, RuntimeError, AttributeError):
            # A setting is gone, or has become a tensor.
            return False

    def _collect_objects(self) -> list[Any]:
        """Everything that a program depends on by identity. The list keeps it alive."""
        objects: list[Any] = []
        for registry in self._registries:
            objects += registry.values()
        for optimizer in self._state.found.optimizers:
            objects += optimizer.param_groups
            for value in optimizer.state.values():
                objects += value.values() if type(value) is dict else _tree.tree_leaves(value)
        for group in self._state.groups:
            objects += group["params"]
        objects += [local_tensor(value) for value in objects if isinstance(value, DTensor)]
        return objects

    def _collect_settings(self) -> list[Any]:
        """Everything that a program depends on by value."""
        settings: list[Any] = []
        for module in self._state.modules:
            settings.append((module.training, module.__class__, getattr(module.forward, "__code__", None)))
        settings += map(len, self._hooks)
        # torch functions look at each attribute of a DTensor, at three times the cost.
        with disable_torch_function():
            settings += map(_OF_TENSOR, self._state.rests)
            settings += map(_OF_TENSOR, self._state.buffers)
            settings += map(gradient_hooks, self._state.rests)
        for group in self._state.groups:
            rate = group.get("lr")
            settings.append(_settings_of(group))
            settings.append(type(rate) if _lifts_rate(group) else rate)
        return settings


def _settings_of(group: dict[str, Any]) -> list[tuple[str, Any]]:
    """The settings of a group of parameters besides the learning rate, as they are now."""
    settings = []
    for name, value in group.items():
        if name not in ("params", "lr"):
            settings.append((name, copy.deepcopy(value) if isinstance(value, (list, dict)) else value))
    return settings


def local_part(value: Any) -> Any:
    """The local tensor of a DTensor; any other value itself."""
    return local_tensor(value) if isinstance(value, DTensor) else value


def _lifts_rate(group: dict[str, Any]) -> bool:
    """Is the learning rate of a group an input of programs, and not a setting?"""
    return isinstance(group.get("lr"), (float, torch.Tensor))


# --------------------------------------------------------------------------------------------------------------------
# Enrolment: the state that a call has found becomes data parallel, by the engine. It can be undone.


class Enrolment:
    """Makes sure that the engine manages the state of a call, and that all ranks have the same."""

    def __init__(self, engine: StateEngine, history: StepHistory, mode: DataParallel, found: FoundState) -> None:
        self._engine, self._history = engine, history
        self._before: StateSnapshot | None = None
        self._optimizers = [o for o in found.optimizers if o not in engine.maker.optimizers]
        known: list[bool] = []

        def check(tensors: list[torch.Tensor], new: int) -> None:
            if not tensors:
                raise SPMDError("The step has no parameters.", remedy="Call it without compiling it.")
            known.extend(managed_by(tensor) is not None for tensor in tensors)
            self._before = StateSnapshot(found) if new else None

        self.roster, slots = engine.enrol(history, mode, found, check=check)
        self._fresh = [managed for managed, had in zip(self.roster.params, known, strict=True) if not had]
        # Modules and optimizers hold what they hold between calls.
        if self.roster.rests and self._before is not None:
            engine.resting.enter(self.roster, slots)
            engine.resting.leave(found.modules, False)
            for optimizer in found.optimizers:
                if why_whole(optimizer) is None:
                    shard_states(optimizer, [managed for managed in self.roster.params if managed.sharded])

    def undo(self) -> None:
        """Restore model and optimizers, if this call was the first to have them."""
        if self._before is not None:
            for managed in self._fresh:
                put_back_plain(managed.plain)
                forget_parameter(managed)
            self._engine.forget(self.roster, self._history, self._optimizers)
            self._before.restore()
