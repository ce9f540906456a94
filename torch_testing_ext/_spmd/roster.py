"""The roster of a step: what it works on is found, admitted and agreed on, in one order."""

import functools
import itertools
import operator
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torch_testing_ext._machine.accelerators import RandomState
from torch_testing_ext._torch.tracing import (
    disable_torch_function,
    gradient_hooks,
    local_tensor,
    set_local_tensor,
    storage_key,
    tree,
)

from .gradient_buckets import BackwardPlan, BucketStore, ManagedParam, managed_by
from .parallel_modes import SPMDError

# --------------------------------------------------------------------------------------------------------------------
# The checks of modules, parameters and buffers before the engine takes them. They change nothing.

# Recognized by name: importing the FSDP packages for an isinstance check would cost every rank half a second.
_WRAPPERS = {
    "DistributedDataParallel": "wrapped in DistributedDataParallel",
    "FullyShardedDataParallel": "sharded by FSDP",
    "FSDPModule": "sharded by FSDP",
}


def admit_modules(roots: Iterable[nn.Module]) -> None:
    """Refuse modules that are data parallel already."""
    for root in roots:
        for module in root.modules():
            for base in type(module).__mro__:
                if base.__name__ in _WRAPPERS and base.__module__.startswith("torch."):
                    raise SPMDError(
                        f"{type(module).__name__} is {_WRAPPERS[base.__name__]}: it would be averaged twice.",
                        remedy="Pass the plain module: the step averages and shards by itself.",
                    )


def admit_tensor(name: str, tensor: torch.Tensor) -> None:
    """Refuse parameters and buffers without values, and DTensors of other meshes."""
    if isinstance(tensor, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)):
        raise SPMDError(f"{name} is not initialized.", remedy="Run the lazy module once before the first call.")
    if tensor.is_meta:
        raise SPMDError(
            f"{name} is on the meta device and has no values.",
            remedy='Materialize the model before the first call: model.to_empty(device="cpu"), then initialize it.',
        )
    if isinstance(tensor, DTensor) and not isinstance(tensor, nn.Parameter):
        raise SPMDError(f"{name} is a DTensor, but no parameter.", remedy="Register it as a plain buffer.")


def admit_inference(params: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse parameters that are to be DTensors and cannot be."""
    for name, tensor in params:
        if tensor.is_inference():
            raise SPMDError(
                f"{name} was made in inference_mode and cannot become a DTensor.",
                remedy='Make it under no_grad, or use DataParallel("replicate", between="plain").',
            )


def admit_sharing(sharded: Iterable[tuple[str, torch.Tensor]], others: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse sharded parameters that share memory with another tensor: rows would no longer be shared."""
    owners: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in sharded:
        if isinstance(tensor, DTensor):
            continue
        key = storage_key(tensor)
        if key in owners:
            _refuse_sharing(owners[key][0], name)
        owners[key] = name, tensor
    for name, tensor in others:
        if tensor.layout is not torch.strided or isinstance(tensor, DTensor):
            continue
        owner, param = owners.get(storage_key(tensor), ("", tensor))
        if param is not tensor:
            _refuse_sharing(owner, name)


def _refuse_sharing(first: str, second: str) -> None:
    raise SPMDError(
        f"{first} and {second} share memory, but are not the same tensor. Shards cannot share it.",
        remedy='Tie weights by the same Parameter (b.weight = a.weight), or use DataParallel("replicate").',
    )


def admit_held(tensors: Iterable[torch.Tensor]) -> None:
    """Refuse DTensors that something besides modules and optimizers holds: the step would use them, and not update."""
    for tensor in tensors:
        managed = managed_by(tensor)
        if managed is not None and managed.rests_as_dtensor and tensor is managed.rest:
            refuse_held(managed, "A list, a dict, an argument or an attribute is or holds")


def refuse_held(managed: ManagedParam, holder: str) -> NoReturn:
    """Raise the error about the DTensor of a parameter in a call."""
    raise SPMDError(
        f"{holder} the DTensor of parameter {managed.name}, which the model does not use in a call.",
        remedy="Make it before the first call or in the step; hold an optimizer where the step finds it.",
    )


def admit_hooks(tensors: Iterable[torch.Tensor]) -> None:
    """Refuse gradient hooks that were put on a DTensor between calls: the step does not use it."""
    for tensor in tensors:
        if isinstance(tensor, DTensor) and gradient_hooks(tensor):
            raise SPMDError(
                f"A parameter of shape {tuple(tensor.shape)} got a gradient hook between calls, on its DTensor.",
                remedy="Register the hook before the first call or in the step, on the plain parameter.",
            )


# --------------------------------------------------------------------------------------------------------------------
# The comparison of models and optimizers, before anything of them is changed, when a call finds new ones.

Facts = Mapping[str, Sequence[str]]


def facts_of(
    params: Iterable[tuple[str, torch.Tensor]], buffers: Iterable[tuple[str, torch.Tensor]], optimizers: list[Optimizer]
) -> dict[str, list[str]]:
    """Everything in which the ranks must agree, one line each, by title."""
    named = [*params]
    numbers = {id(param): number for number, (_, param) in enumerate(named)}
    settings: list[str] = []
    states: list[str] = []
    for optimizer in optimizers:
        settings += _of_optimizer(optimizer, numbers)
        states += _of_state(optimizer, numbers)
    return {
        "parameters": [f"{name}, {_kind(param)}" for name, param in named],
        "buffers": [f"{name}, {_kind(buffer)}" for name, buffer in buffers],
        "optimizers": settings,
        "optimizer states": states,
    }


def compare_facts(of_ranks: Sequence[Facts]) -> None:
    """Raise an error if two ranks differ."""
    for title, first in of_ranks[0].items():
        for rank, facts in enumerate(of_ranks):
            other = facts[title]
            if first == other:
                continue
            nothing = f"nothing (rank 0 has {len(first)}, rank {rank} has {len(other)})"
            pairs = itertools.zip_longest(first, other, fillvalue=nothing)
            on_first, on_other = next(pair for pair in pairs if pair[0] != pair[1])
            raise SPMDError(
                f"The ranks differ in their {title}. Rank 0: {on_first}. Rank {rank}: {on_other}.",
                remedy="Build the same model and optimizer on every rank; only values may differ.",
            )


def state_tensors(optimizers: Iterable[Optimizer]) -> list[torch.Tensor]:
    leaves = [leaf for optimizer in optimizers for leaf in tree().tree_leaves(dict(optimizer.state))]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _of_optimizer(optimizer: Optimizer, numbers: Mapping[int, int]) -> Iterable[str]:
    for number, group in enumerate(optimizer.param_groups):
        params = [numbers.get(id(param)) for param in group["params"]]
        yield f"group {number} of {type(optimizer).__name__} with the parameters {params}"


def _of_state(optimizer: Optimizer, numbers: Mapping[int, int]) -> Iterable[str]:
    for key, value in optimizer.state.items():
        is_tensor = isinstance(key, torch.Tensor)
        owner = f"parameter {numbers.get(id(key))}" if is_tensor else repr(key)
        for path, leaf in tree().tree_flatten_with_path(value)[0]:
            yield f"{owner}{tree().keystr(path)}, {_kind(leaf)}"


def _kind(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{leaf.dtype} of shape {tuple(leaf.shape)}"
    return repr(leaf)


# --------------------------------------------------------------------------------------------------------------------
# The roster: all parameters, buffers and optimizers of one call, in an order that is the same on every rank.

READS_KEPT, READS_UPDATED = 1, 2
# The number of first calls of a step in which mistakes, and what it reads, are looked for.
EARLY = 8


class ParamSlot(NamedTuple):
    """A place in a module where a parameter is registered."""

    module: nn.Module
    name: str
    value: torch.Tensor


def registered(roots: Iterable[nn.Module]) -> tuple[list[ParamSlot], list[torch.Tensor]]:
    """The slots of all parameters of some modules, and their buffers, each once.

    DDP wraps no module without parameters to train, such as a metric or a teacher: its buffers are the rank's own.
    """
    slots: list[ParamSlot] = []
    buffers: dict[int, torch.Tensor] = {}
    modules: dict[nn.Module, bool] = {}
    for root in roots:
        trains = any(param.requires_grad for param in root.parameters())
        for module in root.modules():
            modules[module] = modules.get(module, False) or trains
    for module, trains in modules.items():
        for name, value in module._parameters.items():
            if value is not None:
                slots.append(ParamSlot(module, name, value))
        for buffer in module._buffers.values() if trains else ():
            if buffer is not None:
                buffers[id(buffer)] = buffer
    return slots, [*buffers.values()]


def tensors_of(slots: Iterable[ParamSlot], optimizers: Iterable[Optimizer]) -> list[torch.Tensor]:
    """All parameters, each once: those in slots, then those that only optimizers hold."""
    tensors = {id(slot.value): slot.value for slot in slots}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                # It holds the plain ones if no call has had it.
                managed = managed_by(param)
                tensor = param if managed is None else managed.rest
                tensors.setdefault(id(tensor), tensor)
    return [*tensors.values()]


def slot_names(roots: Iterable[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """The name of each parameter and buffer, in the words of `named_parameters`."""
    several = [*roots]
    for number, root in enumerate(several):
        prefix = "" if len(several) == 1 else f"{type(root).__name__}#{number}"
        yield from root.named_parameters(prefix)
        yield from root.named_buffers(prefix)


@dataclass
class Roster:
    """The state that a step found in a call. The next call of the step uses it again, if it finds the same."""

    params: list[ManagedParam]
    # As they were found: they keep the identities valid.
    tensors: list[torch.Tensor]
    optimizers: list[Optimizer]
    store: BucketStore
    # That all ranks get from rank 0.
    buffers: list[torch.Tensor]
    calls: int = 0
    # The bytes of buffers that all ranks got from rank 0 in the last call.
    shared: int = 0
    # Ran whole in the last call, for sparse gradients.
    sparse: list[Optimizer] = field(default_factory=list)
    # Bits: the step reads gradients of earlier calls, parameters after their update.
    reads: int = 0
    # Of whole values in the last call.
    sums: list[torch.Tensor] = field(default_factory=list)
    plans: dict[str, list[BackwardPlan | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # The model holds DTensors between calls.
        self.rests = any(managed.rests_as_dtensor for managed in self.params)
        self.shards = any(managed.sharded for managed in self.params)
        # Something is sent before the first bucket.
        self.opens_with_header = self.rests or bool(self.buffers)
        self.plains = {id(managed.plain) for managed in self.params}
        self.take(self.tensors)

    def take(self, tensors: list[torch.Tensor]) -> None:
        """Expect these tensors in the next call."""
        self.tensors, self._kinds = tensors, _kinds(tensors)

    def is_eager(self, kind: int) -> bool:
        """Is this kind gathered at once? The first calls show if a rank reads it."""
        return bool(self.reads & kind) or self.calls < EARLY

    def take_sums(self) -> list[torch.Tensor]:
        """The checksums of the last call, once: an error that they cause is raised once."""
        sums, self.sums = self.sums, []
        return sums

    def matches(self, tensors: list[torch.Tensor], optimizers: list[Optimizer]) -> bool:
        same = _same(self.tensors, tensors) and _same(self.optimizers, optimizers)
        return same and self._kinds == _kinds(tensors)

    def plan_of(self, phase: str, turn: int) -> BackwardPlan | None:
        """The plan of the backward number `turn` of a phase, if the last call had one."""
        plans = self.plans.get(phase, ())
        return plans[turn] if turn < len(plans) else None

    @property
    def opening(self) -> BackwardPlan | None:
        """The plan of the first backward, if its first bucket opens a call."""
        return None if self.opens_with_header else self.plan_of("inside", 0)

    def remember(self, phase: str, turn: int, plan: BackwardPlan | None) -> None:
        plans = self.plans.setdefault(phase, [])
        plans += [None] * (turn + 1 - len(plans))
        plans[turn] = plan

    def forget_after(self, phase: str, turns: int) -> None:
        del self.plans.setdefault(phase, [])[turns:]


def _kinds(tensors: list[torch.Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    """The kinds of parameters, by which buckets were made."""
    with disable_torch_function():
        return [(tensor.shape, tensor.dtype) for tensor in tensors]


def _same(known: list[torch.Tensor] | list[Optimizer], now: list[torch.Tensor] | list[Optimizer]) -> bool:
    return len(known) == len(now) and all(map(operator.is_, known, now))


# --------------------------------------------------------------------------------------------------------------------
# Finds the modules and optimizers that a step works on.
#
# They are in its arguments, in attributes of arguments, in closures and default values, and in the globals that its
# code or that of a method it calls names. Shallow places come first, and every rank finds the same objects in the
# same order.

# Step -> self -> trainer -> model.
DEPTH = 4
# A container with more elements holds data.
LONGEST = 256
# The latter of recurrent modules.
_OWN_OF_MODULE = frozenset((*vars(nn.Module()), "_flat_weights"))
_LEAVES = (torch.device, torch.dtype, torch.Generator, types.BuiltinFunctionType, type(None), int, float, str, bytes)


@dataclass
class FoundState:
    """The objects that a step works on: modules that no other found module contains, optimizers, and other tensors."""

    modules: list[nn.Module] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    # Those of them that are arguments, or in containers of arguments.
    inputs: list[torch.Tensor] = field(default_factory=list)


def find_state(step: Any, args: Any = (), kwargs: Any = None) -> FoundState:
    """Find the modules and optimizers that a step uses, from its arguments and what it refers to."""
    found, names = FoundState(), _names_called(step)
    seen: set[int] = set()
    waiting = deque((value, DEPTH) for value in (*args, *(kwargs or {}).values(), step))
    while waiting:
        value, depth = waiting.popleft()
        if id(value) in seen or isinstance(value, _LEAVES):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            found.tensors.append(value)
            continue
        if isinstance(value, nn.Module):
            found.modules.append(value)
        elif isinstance(value, Optimizer):
            found.optimizers.append(value)
            continue
        if depth:
            waiting.extend((inner, depth - 1) for inner in _inside(value, names))
    found.modules = _roots(found.modules)
    found.inputs = [leaf for leaf in tree().tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    return found


def _roots(modules: list[nn.Module]) -> list[nn.Module]:
    """The modules that are part of no other one."""
    if len(modules) < 2:
        return modules
    inner = {id(part) for module in modules for part in module.modules() if part is not module}
    return [module for module in modules if id(module) not in inner]


def _inside(value: Any, names: set[str]) -> Iterable[Any]:
    """The objects to which `value` leads in one step. `names`: those in the code of the train step."""
    if isinstance(value, nn.Module):
        return [inner for name, inner in vars(value).items() if name not in _OWN_OF_MODULE]
    if isinstance(value, dict):
        return [*value.values()] if len(value) <= LONGEST else ()
    if isinstance(value, (list, tuple, deque)):
        return [*value] if len(value) <= LONGEST else ()
    if isinstance(value, (set, frozenset)):
        return _only_one(value)
    if isinstance(value, types.FunctionType):
        return _of_function(value)
    if isinstance(value, types.MethodType):
        return value.__self__, value.__func__
    if isinstance(value, functools.partial):
        return value.func, *value.args, *value.keywords.values()
    if isinstance(value, weakref.ReferenceType):
        return (value(),)
    if isinstance(value, types.CellType):
        return _cell(value)
    return (*_attributes(value), *(() if isinstance(value, type) else _methods(type(value), names)))


def _only_one(values: Iterable[Any]) -> list[Any]:
    """The state in a set, unless there are several objects: their order would differ between ranks."""
    state = [value for value in values if isinstance(value, (nn.Module, Optimizer))]
    return state if len(state) == 1 else []


def _cell(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # not assigned yet
        return ()


def _of_function(function: types.FunctionType) -> Iterator[Any]:
    if _is_of_torch(function.__module__):
        return
    for cell in function.__closure__ or ():
        yield from _cell(cell)
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from vars(function).values()
    names = _names_in(function.__code__)
    for name in names:
        if name in function.__globals__:
            yield from _named(function.__globals__[name], names)


@functools.lru_cache(1024)
def _names_in(code: types.CodeType) -> list[str]:
    """The names of globals and attributes in a piece of code, and in the functions that it defines."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(dict.fromkeys(_names_in(constant)))
    return list(names)


def _named(value: Any, names: list[str], levels: int = 3) -> Iterator[Any]:
    """A global; of a Python module, what the code may mean by `module.name`."""
    if not isinstance(value, types.ModuleType):
        yield value
    elif levels and not _is_of_torch(value.__name__):
        for name in names:
            if name in vars(value):
                yield from _named(vars(value)[name], names, levels - 1)


def _attributes(value: Any) -> Iterator[Any]:
    """The attributes of an object or a class that a user wrote, those of its classes too."""
    if isinstance(value, types.ModuleType):
        return
    if not isinstance(value, type) and "__wrapped__" in getattr(value, "__dict__", ()):
        # A compiled step that this one calls.
        yield value.__wrapped__
    is_class = isinstance(value, type)
    kind = value if is_class else type(value)
    if _is_of_torch(kind.__module__) and not isinstance(value, LRScheduler):
        return
    if not is_class:
        yield from list(getattr(value, "__dict__", {}).values())
    for base in kind.__mro__:
        if base.__module__ == "builtins" or _is_of_torch(base.__module__):
            continue
        for name, inner in list(vars(base).items()):
            if isinstance(inner, types.MemberDescriptorType) and not is_class:
                yield getattr(value, name, None)
            elif isinstance(inner, (nn.Module, Optimizer, dict, list, tuple)) and not name.startswith("__"):
                yield inner


def _names_called(step: Any) -> set[str]:
    """The names in the code of a train step: a function, a method, a partial or an object that is called."""
    function = getattr(step, "func", step)
    function = getattr(function, "__func__", function)
    return set(_names_in(function.__code__)) if isinstance(function, types.FunctionType) else {"__call__"}


def _methods(kind: type, names: set[str]) -> Iterator[types.FunctionType]:
    """The methods of a class with these names, and those that they call: all of them would lead too far."""
    bases = [vars(base) for base in kind.__mro__ if not _is_of_torch(base.__module__)]
    known, new = set(names), names
    while new:
        methods = []
        for base in bases:
            for name in sorted(base.keys() & new):
                member = getattr(base[name], "__func__", base[name])
                if isinstance(member, types.FunctionType):
                    methods.append(member)
        yield from methods
        called = {name for method in methods for name in _names_in(method.__code__)}
        new = called - known
        known |= new


def _is_of_torch(module: str | None) -> bool:
    return module is not None and (module == "torch" or module.startswith(("torch.", "torch_testing_ext.")))


# --------------------------------------------------------------------------------------------------------------------
# Snapshots of everything that a call may change, to undo a run of the step.


class ModuleContents:
    """The attributes and registries of modules, and which objects optimizers hold, without the values of tensors."""

    def __init__(self, found: FoundState) -> None:
        dicts: list[Any] = []
        lists: list[list[Any]] = []
        for module in dict.fromkeys(module for root in found.modules for module in root.modules()):
            dicts += [module.__dict__, module._parameters, module._buffers, module._modules]
        for optimizer in found.optimizers:
            dicts += [optimizer.__dict__, optimizer.state, *optimizer.param_groups]
            dicts += [value for value in optimizer.state.values() if isinstance(value, dict)]
            lists.append(optimizer.param_groups)
            lists += [group["params"] for group in optimizer.param_groups]
        self._dicts = [(changed, dict(changed)) for changed in dicts]
        self._lists = [(changed, list(changed)) for changed in lists]

    def restore(self) -> None:
        for changed, content in self._dicts:
            changed.clear()
            changed.update(content)
        for changed_list, items in self._lists:
            changed_list[:] = items


class StateSnapshot:
    """Modules and optimizers, with the values of all their tensors, of gradients, and of `others`."""

    def __init__(self, found: FoundState, others: Iterable[torch.Tensor] = ()) -> None:
        self._contents = ModuleContents(found)
        self._random = RandomState()
        values: list[Any] = []
        for root in found.modules:
            values += [*root.parameters(), *root.buffers()]
        for optimizer in found.optimizers:
            for group in optimizer.param_groups:
                values += group["params"]
        for optimizer in found.optimizers:
            values += tree().tree_leaves(dict(optimizer.state))
        tensors = {id(value): value for value in (*values, *others) if isinstance(value, torch.Tensor)}
        self._kept = [_KeptTensor(tensor) for tensor in tensors.values()]

    @torch.no_grad()
    def restore(self) -> None:
        self._contents.restore()
        for tensor in self._kept:
            tensor.restore()
        self._random.restore()


class _KeptTensor:
    """A tensor with its memory, a copy of its values, and its gradient."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.trainable = tensor.requires_grad
        self.attributes = dict(tensor.__dict__)
        self.memory = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor.detach()
        self.values = self.memory.clone()
        self.grad = _KeptTensor(tensor.grad) if tensor.is_leaf and tensor.grad is not None else None

    def restore(self) -> None:
        tensor = self.tensor
        self.memory.copy_(self.values)
        tensor.__dict__.update(self.attributes)
        if isinstance(tensor, DTensor):
            set_local_tensor(tensor, self.memory)
        elif self.memory.layout is torch.strided and tensor.data_ptr() != self.memory.data_ptr():
            tensor.data = self.memory
        if tensor.is_leaf:
            tensor.requires_grad_(self.trainable)
            tensor.grad = None if self.grad is None else self.grad.tensor
        if self.grad is not None:
            self.grad.restore()
