"""The names that a class of a source file binds, read without importing it."""

import ast
from pathlib import Path

from .defined_names import bound_by, parse_source, statements


def find_class(file: Path, name: str) -> ast.ClassDef | None:
    for node in statements(parse_source(file).body):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    return None


def defined_by(node: ast.ClassDef) -> set[str]:
    """The names that a class body binds."""
    names: set[str] = set()
    for statement in statements(node.body):
        names.update(name for name, _ in bound_by(statement))
    return names


def members_of(node: ast.ClassDef) -> set[str]:
    """The names that a class body binds, and those that its methods assign to `self` or `cls`."""
    assigned = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
            owner = ast.unparse(part.value)
            if owner in ("self", "cls"):
                assigned.add(part.attr)
    return defined_by(node) | assigned
