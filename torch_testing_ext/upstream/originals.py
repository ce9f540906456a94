"""PyTorch's own modules in a drop-in run, loaded next to their stand-ins, and members of its TestCase.

A module is loaded only when one of its names is needed, since loading takes seconds and may touch the accelerator.
The names that were needed are recorded for --explain. Our TestCase gets the members that only PyTorch's has:
PyTorch's functions, bound to the test. Which ones exist is read from the source, and loads nothing.
"""

import ast
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from . import defined_names, mapping

loaded: dict[str, ModuleType] = {}
originals_requested: dict[str, set[str]] = {}
# Called with each module of PyTorch's that was loaded.
after_loading: list[Callable[[ModuleType], None]] = []


def load_original(name: str) -> ModuleType:
    """PyTorch's module of this name. If this torch has none, raises AttributeError, as for a missing name."""
    if name not in loaded:
        parent = importlib.import_module(name.rpartition(".")[0])
        # Whatever sys.modules has.
        spec = importlib.machinery.PathFinder.find_spec(name, parent.__path__)
        if spec is None or spec.loader is None:
            raise AttributeError(f"this torch has no module {name} in which to look for it")
        module = loaded[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del loaded[name]
            raise
        for callback in after_loading:
            callback(module)
    return loaded[name]


def record_original(module: str, name: str) -> None:
    """Record that a name was taken from PyTorch, unless torch itself asked for it."""
    if not _caller().startswith("torch."):
        originals_requested.setdefault(module, set()).add(name)


def _caller() -> str:
    """The module that looks the name up: the first outside this package and importlib."""
    frame = sys._getframe(2)
    while frame.f_back is not None and _name_of(frame.f_globals).startswith(("importlib", __package__)):
        frame = frame.f_back
    return _name_of(frame.f_globals)


def _name_of(module_globals: dict[str, object]) -> str:
    return str(module_globals.get("__name__", ""))


# -- members of PyTorch's TestCase

HOME = f"{mapping.THEIR_KIT}.common_utils"


def add_missing_members(ours: type) -> None:
    """Give our TestCase the members that only PyTorch's has. Safe to call again."""
    if hasattr(ours, "__getattr__"):
        return

    def __getattr__(self: Any, name: str) -> Any:
        if name not in _members_of_theirs():
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        member = inspect.getattr_static(load_original(HOME).TestCase, name)
        record_original(HOME, f"TestCase.{name}")
        return member.__get__(self, type(self)) if hasattr(member, "__get__") else member

    ours.__getattr__ = __getattr__  # type: ignore[attr-defined]
    for name, value in _constants_of_theirs().items():
        if not hasattr(ours, name):
            # It is also looked up on the class, where __getattr__ does not apply.
            setattr(ours, name, value)


@functools.cache
def _their_class() -> ast.ClassDef:
    node = defined_names.find_class(mapping.find_source(HOME), "TestCase")
    assert node is not None
    return node


@functools.cache
def _members_of_theirs() -> frozenset[str]:
    return frozenset(defined_names.defined_by(_their_class()))


def _constants_of_theirs() -> dict[str, Any]:
    constants = {}
    for node in _their_class().body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or not isinstance(node.value, ast.Constant):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            if isinstance(target, ast.Name):
                constants[target.id] = node.value.value
    return constants
