"""Gives our TestCase, in a drop-in run, the members that only PyTorch's TestCase has.

They are PyTorch's functions, bound to the test. Which ones exist is read from the source: PyTorch's module is loaded
only when a test uses one.
"""

from __future__ import annotations

import ast
import functools
import inspect
from typing import Any

from . import mapping, names, originals

HOME = f"{mapping.THEIR_KIT}.common_utils"


def add_missing(ours: type) -> None:
    """Give our TestCase the members that only PyTorch's has. Safe to call again."""
    if hasattr(ours, "__getattr__"):
        return

    def __getattr__(self: Any, name: str) -> Any:
        if name not in _members_of_theirs():
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        found = inspect.getattr_static(originals.load(HOME).TestCase, name)
        originals.record(HOME, f"TestCase.{name}")
        return found.__get__(self, type(self)) if hasattr(found, "__get__") else found

    ours.__getattr__ = __getattr__  # type: ignore[attr-defined]
    for name, value in _constants_of_theirs().items():
        if not hasattr(ours, name):
            setattr(ours, name, value)  # also looked up on the class, where __getattr__ does not apply


@functools.cache
def _their_class() -> ast.ClassDef:
    found = names.find_class(names.find_source(HOME), "TestCase")
    assert found is not None
    return found


@functools.cache
def _members_of_theirs() -> frozenset[str]:
    return frozenset(names.defined_by(_their_class()))


def _constants_of_theirs() -> dict[str, Any]:
    return {
        target.id: node.value.value
        for node in _their_class().body
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Constant)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
