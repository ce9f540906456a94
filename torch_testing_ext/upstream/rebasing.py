"""Gives PyTorch's own test classes our bases, and so our launch, where that is safe.

It is safe if the class neither overrides nor uses the private members of PyTorch's base: those by which it starts
and watches ranks, and which ours lacks. Other bases, such as TestCase, start no ranks and are always replaced. The
class itself is changed, through its `__bases__`: the super() calls of its methods would not know a copy.
"""

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import unittest
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch_testing_ext._process.code_names import names_in

from . import defined_names, mapping
from .originals import load_original


@dataclass(frozen=True)
class LaunchChoice:
    """Whether a PyTorch class gets our launch; if not, which members prevent it."""

    name: str
    base: str
    private_members: tuple[str, ...]

    def __str__(self) -> str:
        if self.private_members:
            return f"  {self.name}: PyTorch's launch, since it uses or overrides {', '.join(self.private_members)}"
        return f"  {self.name}: our launch, through our {self.base}"


_choices: dict[str, LaunchChoice] = {}


def rebase_classes(module: ModuleType) -> None:
    """Replace the bases of the test classes that a module of PyTorch's defines, where that is safe."""
    for cls in list(vars(module).values()):
        is_its_own = inspect.isclass(cls) and cls.__module__ == module.__name__
        if not is_its_own or _has_counterpart(cls):
            continue
        bases = tuple(_choose(cls, base) for base in cls.__bases__)
        if bases != cls.__bases__:
            cls.__bases__ = bases


def explain_rebase() -> list[str]:
    """Lines that say whose launch each class of PyTorch's uses."""
    if not _choices:
        return []
    return ["Classes of PyTorch's that start ranks:", *map(str, _choices.values())]


def _has_counterpart(cls: type) -> bool:
    ours = mapping.module_on(mapping.Side.OURS, cls.__module__)
    return ours is not None and hasattr(importlib.import_module(ours), cls.__name__)


def _choose(cls: type, base: type) -> type:
    """The base that a class gets in place of one that it has."""
    pair = _home_of(base)
    if pair is None:
        return base
    name = base.__name__
    private_members = sorted(_used_by(cls) & _private_members_of_their(name))
    if name in mapping.LAUNCHING_BASES:
        _choices[cls.__qualname__] = LaunchChoice(cls.__qualname__, name, tuple(private_members))
    home = load_original(pair.theirs) if private_members else importlib.import_module(pair.ours)
    chosen: type = getattr(home, name)
    return chosen


def _home_of(base: type) -> mapping.MirroredModule | None:
    """The mirrored module that defines this test base on both sides, if there is one."""
    if not issubclass(base, unittest.TestCase):
        return None
    for pair in mapping.MIRRORED:
        file = mapping.source_of(pair.theirs, mapping.installed_torch())
        if file is None or defined_names.find_class(file, base.__name__) is None:
            continue
        home = importlib.import_module(pair.ours)
        ours = getattr(home, base.__name__, None)
        if ours is not None and (base is ours or base.__module__ == pair.theirs):
            return pair
    return None


# -- the names that a class uses, and the private members of PyTorch's launch


def _used_by(cls: type) -> set[str]:
    """All names that a class defines or that its functions look up."""
    used = set(vars(cls))
    for value in vars(cls).values():
        for code in _codes_of(value):
            used |= names_in(code)
    return used


def _codes_of(value: Any) -> Iterator[CodeType]:
    match value:
        case FunctionType():
            yield value.__code__
            yield from _codes_of(getattr(value, "__wrapped__", None))
        case classmethod() | staticmethod():
            yield from _codes_of(value.__func__)
        case property():
            for part in (value.fget, value.fset):
                yield from _codes_of(part)


@functools.cache
def _private_members_of_their(base: str) -> frozenset[str]:
    """The members that PyTorch's launching base and its bases have and ours lacks."""
    module = mapping.LAUNCHING_BASES.get(base)
    if module is None:
        return frozenset()
    home = mapping.module_on(mapping.Side.OURS, module)
    assert home is not None
    classes = getattr(importlib.import_module(home), base).__mro__
    theirs = set().union(*(_members_of_their(cls.__name__) for cls in classes))
    ours = set().union(*(_members_of(cls) for cls in classes))
    return frozenset(theirs - ours)


def _members_of_their(base: str) -> set[str]:
    module = mapping.LAUNCHING_BASES.get(base)
    if module is None:
        return set()
    file = mapping.source_of(module, mapping.installed_torch())
    return set() if file is None else _members_in(file, base)


def _members_of(cls: type) -> set[str]:
    """The members of a class of ours or of a base of it, including those of its instances."""
    members = set(vars(cls))
    if cls.__module__ != "builtins":
        members |= _members_in(Path(inspect.getfile(cls)), cls.__name__)
    return members


def _members_in(file: Path, name: str) -> set[str]:
    """The members of a class by its source; none if the file has no such class."""
    node = defined_names.find_class(file, name)
    return set() if node is None else defined_names.members_of(node)
