"""Gives PyTorch's own test classes our bases, and so our launch, where that is safe.

It is safe if the class neither overrides nor uses the private members of PyTorch's base: those by which it starts
and watches ranks, and which ours lacks. Other bases, such as TestCase, start no ranks and are always replaced. The
class itself is changed, through its `__bases__`: the super() calls of its methods would not know a copy.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import unittest
from dataclasses import dataclass
from types import ModuleType

from . import mapping, members_of_classes
from .originals import load_original
from .private_members import private_members_of_their, used_by


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
    private_members = sorted(used_by(cls) & private_members_of_their(name))
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
        if file is None or members_of_classes.find_class(file, base.__name__) is None:
            continue
        home = importlib.import_module(pair.ours)
        ours = getattr(home, base.__name__, None)
        if ours is not None and (base is ours or base.__module__ == pair.theirs):
            return pair
    return None
