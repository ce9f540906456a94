"""The members that only PyTorch's TestCase has, in ours: PyTorch's functions, bound to the test.

Which ones exist is read from the source, and loads nothing.
"""

import ast
import functools
import inspect
from typing import Any

from . import mapping, members_of_classes
from .originals import load_original, record_original

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
    node = members_of_classes.find_class(mapping.find_source(HOME), "TestCase")
    assert node is not None
    return node


@functools.cache
def _members_of_theirs() -> frozenset[str]:
    return frozenset(members_of_classes.defined_by(_their_class()))


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
