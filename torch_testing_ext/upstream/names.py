"""The names that a source file defines, read without importing it: no accelerator and no torch needed."""

import ast
import enum
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

from .mapping import OUR_KIT, THEIR_KIT, UserError, installed_torch, source_of


class NameKind(enum.Enum):
    """The way in which a module comes by a name."""

    CLASS = "class"
    FUNCTION = "function"
    VALUE = "value"
    REEXPORTED = "re-exported"  # imported from another module of the test kit
    IMPORTED = "imported"  # imported from elsewhere


def parse(file: Path) -> ast.Module:
    return _parse(file.read_bytes(), str(file))


@functools.cache
def _parse(source: bytes, file: str) -> ast.Module:
    return ast.parse(source, file)


# -- of a module


def defined_in(file: Path) -> dict[str, NameKind]:
    """The names that a module has at its top level."""
    return {name: kind for node in statements(parse(file).body) for name, kind in bound_by(node)}


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when the module is imported, including those below `if`, `try`, `with` and `for`."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With, ast.For)):
            for part in ("body", "orelse", "finalbody"):
                yield from statements(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from statements(handler.body)


def bound_by(node: ast.stmt) -> Iterator[tuple[str, NameKind]]:
    """The names that a statement binds."""
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
            of_kit = (node.module or "").startswith((f"{THEIR_KIT}.", f"{OUR_KIT}."))
            kind = NameKind.REEXPORTED if of_kit else NameKind.IMPORTED
            yield from ((alias.asname or alias.name, kind) for alias in node.names)
        case ast.Import():
            yield from ((alias.asname or alias.name.partition(".")[0], NameKind.IMPORTED) for alias in node.names)


def _targets(target: ast.expr) -> Iterator[str]:
    return (node.id for node in ast.walk(target) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))


# -- of a class


def find_class(file: Path, name: str) -> ast.ClassDef | None:
    found = (node for node in statements(parse(file).body) if isinstance(node, ast.ClassDef) and node.name == name)
    return next(found, None)


def defined_by(node: ast.ClassDef) -> set[str]:
    """The names that a class body binds."""
    return {name for statement in statements(node.body) for name, _ in bound_by(statement)}


def members_of(node: ast.ClassDef) -> set[str]:
    """The names that a class body binds, and those that its methods assign to `self` or `cls`."""
    assigned = {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute)
        and isinstance(part.ctx, ast.Store)
        and ast.unparse(part.value) in ("self", "cls")
    }
    return defined_by(node) | assigned


def find_source(module: str) -> Path:
    """The source file of a module of the installed torch."""
    file = source_of(module, installed_torch())
    if file is None:
        raise UserError(f"the installed torch has no module {module}")
    return file
