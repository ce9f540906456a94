"""The names that a source file defines, read without importing it: no accelerator and no torch needed."""

import ast
import enum
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

from .mapping import OUR_KIT, THEIR_KIT


class NameKind(enum.Enum):
    """The way in which a module comes by a name."""

    CLASS = "class"
    FUNCTION = "function"
    VALUE = "value"
    REEXPORTED = "re-exported"  # imported from another module of the test kit
    IMPORTED = "imported"  # imported from elsewhere


def parse_source(file: Path) -> ast.Module:
    return _parse(file.read_bytes(), str(file))


@functools.cache
def _parse(source: bytes, file: str) -> ast.Module:
    return ast.parse(source, file)


def defined_in(file: Path) -> dict[str, NameKind]:
    """The names that a module has at its top level."""
    kinds: dict[str, NameKind] = {}
    for statement in statements(parse_source(file).body):
        kinds.update(bound_by(statement))
    return kinds


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
            for target in node.targets:
                yield from _values_bound_by(target)
        case ast.AnnAssign() | ast.AugAssign():
            yield from _values_bound_by(node.target)
        case ast.ImportFrom():
            module = node.module or ""
            of_kit = module.startswith((f"{THEIR_KIT}.", f"{OUR_KIT}."))
            kind = NameKind.REEXPORTED if of_kit else NameKind.IMPORTED
            for alias in node.names:
                yield alias.asname or alias.name, kind
        case ast.Import():
            for alias in node.names:
                top = alias.name.partition(".")[0]
                yield alias.asname or top, NameKind.IMPORTED


def _values_bound_by(target: ast.expr) -> Iterator[tuple[str, NameKind]]:
    for node in ast.walk(target):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, NameKind.VALUE
