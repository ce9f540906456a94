"""What a source file defines, read without importing it: no accelerator is asked, no version of torch needed."""

from __future__ import annotations

import ast
import enum
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

from .mapping import OUR_KIT, THEIR_KIT, Mistake, installed_torch, source_of


class NameKind(enum.Enum):
    CLASS = "class"
    FUNCTION = "function"
    VALUE = "value"
    HANDED_ON = "handed on"  # imported from another module of the test kit
    IMPORTED = "imported"  # from elsewhere


def parse(file: Path) -> ast.Module:
    return _parse(file.read_bytes(), str(file))


@functools.cache
def _parse(source: bytes, file: str) -> ast.Module:
    return ast.parse(source, file)


def defined_in(file: Path) -> dict[str, NameKind]:
    """The names a module has at its top level."""
    return {name: kind for node in statements(parse(file).body) for name, kind in _bound_by(node)}


def declared_in(file: Path) -> set[str]:
    """What a module lists in its `__all__`."""
    assigned = (node for node in statements(parse(file).body) if isinstance(node, ast.Assign))
    lists = (node.value for node in assigned if "__all__" in bound_by(node))
    parts = (part for found in lists if isinstance(found, (ast.List, ast.Tuple)) for part in found.elts)
    return {part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)}


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when the module is imported, those under `if`, `try` and `with` included."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With, ast.For)):
            for part in ("body", "orelse", "finalbody"):
                yield from statements(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from statements(handler.body)


def _bound_by(node: ast.stmt) -> Iterator[tuple[str, NameKind]]:
    match node:
        case ast.ClassDef():
            yield node.name, NameKind.CLASS
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            yield node.name, NameKind.FUNCTION
        case ast.Assign():
            yield from ((name, NameKind.VALUE) for target in node.targets for name in _targets(target))
        case ast.AnnAssign() | ast.AugAssign():
            yield from ((name, NameKind.VALUE) for name in _targets(node.target))
        case ast.ImportFrom():
            kit = (node.module or "").startswith((f"{THEIR_KIT}.", f"{OUR_KIT}."))
            yield from ((a.asname or a.name, NameKind.HANDED_ON if kit else NameKind.IMPORTED) for a in node.names)
        case ast.Import():
            yield from ((a.asname or a.name.partition(".")[0], NameKind.IMPORTED) for a in node.names)


def bound_by(node: ast.stmt) -> set[str]:
    """The names that a statement gives a meaning."""
    return {name for name, _ in _bound_by(node)}


def _targets(target: ast.expr) -> Iterator[str]:
    return (node.id for node in ast.walk(target) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))


def find_class(file: Path, name: str) -> ast.ClassDef | None:
    found = (node for node in statements(parse(file).body) if isinstance(node, ast.ClassDef) and node.name == name)
    return next(found, None)


def defined_by(node: ast.ClassDef) -> set[str]:
    return {name for statement in statements(node.body) for name, _ in _bound_by(statement)}


def members_of(node: ast.ClassDef) -> set[str]:
    """What a class defines, and what its methods assign to `self` or `cls`."""
    assigned = {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and _is_self(part.value)
    }
    return defined_by(node) | assigned


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def find_source(module: str) -> Path:
    """The file of a module of the installed torch."""
    file = source_of(module, installed_torch())
    if file is None:
        raise Mistake(f"the installed torch has no module {module}")
    return file
