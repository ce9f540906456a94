"""What a step returns: tensors and plain values, in containers that can be built again at each call."""

from __future__ import annotations

import collections
import copy
import functools
import types
from collections.abc import AsyncGenerator, Coroutine, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torch_testing_ext._torch import is_fake, tree

from ..errors import SPMDError
from .arguments import attributes_of_record, is_plain, is_record

_tree = tree()
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_RUN_LATER = (Iterator, Coroutine, AsyncGenerator)
_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_LIMIT = 10_000


class _Record:
    """A dataclass, namespace or the like in a result, and its attributes."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.attributes = {name: with_records(item) for name, item in attributes_of_record(value).items()}


class _Size:
    """A torch.Size in a result."""

    def __init__(self, value: torch.Size) -> None:
        self.value = value


def _flatten(record: _Record) -> tuple[list[Any], Any]:
    return [*record.attributes.values()], (record.value, (*record.attributes,))


def _unflatten(items: Any, context: Any) -> Any:
    value, names = context
    made = copy.copy(value)
    for name, item in zip(names, items, strict=True):
        object.__setattr__(made, name, item)
    return made


_tree.register_pytree_node(_Record, _flatten, _unflatten)
_tree.register_pytree_node(_Size, lambda size: ([*size.value], None), lambda items, _: torch.Size(items))


def with_records(result: Any) -> Any:
    """`result` with nodes of a tree in place of records and sizes."""
    for path, _ in _tree.tree_flatten_with_path(result)[0]:
        if any(_holds_traced(getattr(entry, "key", None)) for entry in path):
            raise SPMDError(
                "The step returns a dict that has a tensor or a size of an input as a key.",
                remedy="Return it among the values: a list of pairs, for instance.",
            )
    return _tree.tree_map(_as_node, result, is_leaf=lambda value: type(value) is torch.Size)


def _as_node(leaf: Any) -> Any:
    if type(leaf) is torch.Size:
        return _Size(leaf)
    return _Record(leaf) if is_record(leaf) and _holds_traced(leaf) else leaf


def refuse_unrepeatable(leaf: Any) -> None:
    """Refuse an object in a result that later calls could not build again."""
    if is_plain(leaf) or isinstance(leaf, (nn.Module, Optimizer)):
        return
    kind = type(leaf).__name__
    if isinstance(leaf, _RUN_LATER):
        raise SPMDError(
            f"The step returns a {kind}, whose code would run after the step. The traced program runs no Python code.",
            remedy="Return a list or tuple of tensors: list(...). A step is a plain function, without yield or async.",
        )
    if _holds_traced(leaf):
        raise SPMDError(
            f"The step returns an object of the class {kind} with tensors in it, which later calls could not build.",
            remedy="Return tensors in a tuple, list, dict, named tuple or dataclass.",
        )


def _holds_traced(value: Any) -> bool:
    """Whether tensors or sizes of the trace can be reached from `value`, other than through modules and optimizers."""
    stack, seen = [value], {id(value): value}
    while stack and len(seen) < _LIMIT:
        value = stack.pop()
        if is_fake(value) or isinstance(value, _SYMBOLS):
            return True
        for item in _parts(value):
            if id(item) not in seen and not is_plain(item):
                seen[id(item)] = item
                stack.append(item)
    return False


def _parts(value: Any) -> list[Any]:
    if isinstance(value, (nn.Module, Optimizer, type, types.ModuleType, torch.Tensor)):
        return []
    if isinstance(value, dict):
        return [*value, *value.values(), *getattr(value, "__dict__", {}).values()]
    if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        return [*value, *getattr(value, "__dict__", {}).values()]
    if isinstance(value, _VIEWS):
        return list(value)  # type: ignore[call-overload, no-any-return]
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if isinstance(value, types.MethodType):
        return [value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    slots = [name for base in type(value).__mro__ for name in _names(base.__dict__.get("__slots__", ()))]
    found = [getattr(value, name) for name in slots if hasattr(value, name) and not name.startswith("__")]
    return [*found, *getattr(value, "__dict__", {}).values()]


def _names(slots: Any) -> list[str]:
    return [slots] if isinstance(slots, str) else [*slots]
