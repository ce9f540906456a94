"""Finds the modules and optimizers that a step works on.

They are in its arguments, in attributes of arguments, in closures and default values, and in the globals that its code
or that of a method it calls names. Shallow places come first, and every rank finds the same objects in the same order.
"""

import functools
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torch_testing_ext._torch.module_parts import OWN_OF_MODULES

# Step -> self -> trainer -> model.
DEPTH = 4
# A container with more elements holds data.
LONGEST = 256
_LEAVES = (torch.device, torch.dtype, torch.Generator, types.BuiltinFunctionType, type(None), int, float, str, bytes)


@dataclass
class FoundState:
    """The objects that a step works on: modules that no other found module contains, optimizers, and other tensors."""

    modules: list[nn.Module] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)


def named_state(found: FoundState) -> tuple[list[tuple[str, Any]], list[tuple[str, torch.Tensor]]]:
    """All parameters and buffers by name, each once."""
    params: dict[int, tuple[str, Any]] = {}
    buffers: dict[int, tuple[str, torch.Tensor]] = {}
    for number, root in enumerate(found.modules):
        prefix = "" if len(found.modules) == 1 else f"{type(root).__name__}#{number}"
        trains = False
        for name, param in root.named_parameters(prefix):
            params.setdefault(id(param), (name, param))
            trains |= param.requires_grad
        if trains:
            # The buffers of a metric or a teacher are the rank's own, as under DDP.
            buffers.update({id(buffer): (name, buffer) for name, buffer in root.named_buffers(prefix)})
    for optimizer in found.optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                params.setdefault(id(param), (f"parameter {len(params)} of an optimizer", param))
    return list(params.values()), list(buffers.values())


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
        return [inner for name, inner in vars(value).items() if name not in OWN_OF_MODULES]
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
    names = names_in(function.__code__)
    for name in names:
        if name in function.__globals__:
            yield from _named(function.__globals__[name], names)


@functools.lru_cache(1024)
def names_in(code: types.CodeType) -> list[str]:
    """The names of globals and attributes in a piece of code, and in the functions that it defines."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(dict.fromkeys(names_in(constant)))
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
    return set(names_in(function.__code__)) if isinstance(function, types.FunctionType) else {"__call__"}


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
        called = {name for method in methods for name in names_in(method.__code__)}
        new = called - known
        known |= new


def _is_of_torch(module: str | None) -> bool:
    return module is not None and (module == "torch" or module.startswith(("torch.", "proto.")))
