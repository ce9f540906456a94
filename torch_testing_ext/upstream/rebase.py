"""Classes of PyTorch's that derive from its bases: which of them may stand on ours instead, and so get our launch.

May, if the class neither overrides nor uses what PyTorch's base keeps to itself: the members by which it starts and
watches ranks, and which ours has not. Other bases, TestCase for one, start no ranks and are always exchanged. The class
itself is changed, by its `__bases__`: a copy would not be the one that its methods' super() knows.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import unittest
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from . import mapping, names, originals


@dataclass(frozen=True)
class Decision:
    """Whose launch a class of PyTorch's has, and what was in the way of ours."""

    name: str
    base: str
    in_the_way: tuple[str, ...]

    def __str__(self) -> str:
        if self.in_the_way:
            return f"  {self.name}: PyTorch's launch, since it uses or overrides {', '.join(self.in_the_way)}"
        return f"  {self.name}: our launch, by our {self.base}"


_decisions: dict[str, Decision] = {}


def settle(module: ModuleType) -> None:
    """Give the test classes that a module of PyTorch's defines the bases they may have."""
    for cls in list(vars(module).values()):
        if inspect.isclass(cls) and cls.__module__ == module.__name__ and not _has_counterpart(cls):
            bases = tuple(_choose(cls, base) for base in cls.__bases__)
            if bases != cls.__bases__:
                cls.__bases__ = bases


def explain() -> list[str]:
    return ["Classes of PyTorch's that start ranks:", *map(str, _decisions.values())] if _decisions else []


def _has_counterpart(cls: type) -> bool:
    ours = mapping.module_on(mapping.Side.OURS, cls.__module__)
    return ours is not None and hasattr(importlib.import_module(ours), cls.__name__)


def _choose(cls: type, base: type) -> type:
    pair = _home_of(base)
    if pair is None:
        return base
    in_the_way = tuple(sorted(_used_by(cls) & _kept_by_their(base.__name__)))
    if base.__name__ in mapping.LAUNCHING_BASES:
        _decisions[cls.__qualname__] = Decision(cls.__qualname__, base.__name__, in_the_way)
    home = originals.load(pair.theirs) if in_the_way else importlib.import_module(pair.ours)
    chosen: type = getattr(home, base.__name__)
    return chosen


def _home_of(base: type) -> mapping.Mirrored | None:
    """The pair of modules that define this base of tests, if both have it."""
    if not issubclass(base, unittest.TestCase):
        return None
    for pair in mapping.here():
        file = mapping.source_of(pair.theirs, mapping.installed_torch())
        if file is None or names.find_class(file, base.__name__) is None:
            continue
        ours = getattr(importlib.import_module(pair.ours), base.__name__, None)
        if ours is not None and (base is ours or base.__module__ == pair.theirs):
            return pair
    return None


# -- what a class uses, and what PyTorch's launch keeps to itself


def _used_by(cls: type) -> set[str]:
    """All names that a class defines, or that its functions look up."""
    codes = (code for value in vars(cls).values() for code in _codes_of(value))
    return set(vars(cls)).union(*map(_names_in, codes))


def _codes_of(value: Any) -> Iterator[CodeType]:
    """The code of a function or of what wraps one."""
    match value:
        case FunctionType():
            yield value.__code__
            yield from _codes_of(getattr(value, "__wrapped__", None))
        case classmethod() | staticmethod():
            yield from _codes_of(value.__func__)
        case property():
            for part in (value.fget, value.fset):
                yield from _codes_of(part)


def _names_in(code: CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names_in, inner))


@functools.cache
def _kept_by_their(base: str) -> frozenset[str]:
    """The members of PyTorch's launching base, and of those it derives from, that ours has not."""
    module = mapping.LAUNCHING_BASES.get(base)
    if module is None:
        return frozenset()
    home = mapping.module_on(mapping.Side.OURS, module)
    assert home is not None
    ours = getattr(importlib.import_module(home), base)
    theirs = {name for cls in ours.__mro__ for name in _members_of_their(cls.__name__)}
    return frozenset(theirs - {name for cls in ours.__mro__ for name in _members_of(cls)})


def _members_of_their(base: str) -> set[str]:
    module = mapping.LAUNCHING_BASES.get(base)
    file = mapping.source_of(module, mapping.installed_torch()) if module else None
    node = names.find_class(file, base) if file else None
    return names.members_of(node) if node else set()


def _members_of(cls: type) -> set[str]:
    """Of a class of ours, or one that it derives from: those of its instances too."""
    node = names.find_class(Path(inspect.getfile(cls)), cls.__name__) if cls.__module__ != "builtins" else None
    return set(vars(cls)) | (names.members_of(node) if node else set())
