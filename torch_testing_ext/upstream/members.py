"""Members of PyTorch's TestCase that ours has not are found on ours all the same, in a drop-in run.

They are PyTorch's functions, bound to the test. Its source says which there are: its module is loaded for those alone.
"""

from __future__ import annotations

import ast
import functools
import inspect
from typing import Any

from . import mapping, names, originals

HOME = f"{mapping.THEIR_KIT}.common_utils"


def lend(ours: type) -> None:
    """Give our TestCase the members that only PyTorch's has. To do it again changes nothing."""
    if hasattr(ours, "__getattr__"):
        return

    def __getattr__(self: Any, name: str) -> Any:
        if name not in _known_to_theirs():
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        found = inspect.getattr_static(originals.load(HOME).TestCase, name)
        originals.note(HOME, f"TestCase.{name}")
        return found.__get__(self, type(self)) if hasattr(found, "__get__") else found

    ours.__getattr__ = __getattr__  # type: ignore[attr-defined]
    for name, value in _constants_of_theirs().items():
        if not hasattr(ours, name):
            setattr(ours, name, value)  # asked of the class too, where __getattr__ does not help


@functools.cache
def _their_class() -> ast.ClassDef:
    found = names.find_class(names.find_source(HOME), "TestCase")
    assert found is not None
    return found


@functools.cache
def _known_to_theirs() -> frozenset[str]:
    return frozenset(names.defined_by(_their_class()))


def _constants_of_theirs() -> dict[str, Any]:
    return {
        target.id: node.value.value
        for node in _their_class().body
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Constant)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
