"""What a patched test needs and PyTorch has not, appended to the helper module that has its place there.

A definition goes with those it stands on, and with the imports they need. What stands on a whole module of ours, on the
launch for one, cannot go: that is a refusal, not a half.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from . import names
from .mapping import OUR_KIT, PACKAGE, Mistake, Side, module_on, source_of


class _CannotGo(Exception):
    """Why a definition cannot be taken along."""


def appended(wanted: Iterable[str], checkout: Path) -> dict[Path, bytes]:
    """The checkout's helper modules with these names of ours (dotted) appended, by their paths in it."""
    helpers: dict[str, _Helper] = {}
    reasons = []
    for dotted in dict.fromkeys(wanted):
        try:
            module, _, name = dotted.rpartition(".")
            there = module_on(Side.THEIRS, module)
            file = source_of(there, checkout) if there else None
            if file is None:
                raise _CannotGo("there is no helper module that it belongs to")
            helpers.setdefault(module, _Helper(file, _source(module))).take(name, _source(module))
        except _CannotGo as why:
            reasons.append(f"{dotted} cannot be taken along: {why}")
    if reasons:
        raise Mistake("\n".join(reasons))
    return {helper.file.relative_to(checkout): helper.extended() for helper in helpers.values()}


def _source(module: str) -> Path:
    file = source_of(module, PACKAGE.parent)
    if file is None:
        raise _CannotGo(f"{module} has no source here")
    return file


@dataclass
class _Helper:
    """A module of PyTorch's, and what is to be added to it."""

    file: Path
    mirror: Path  # our module of that name
    imports: dict[str, str] = field(default_factory=dict)  # by the name they bind
    definitions: dict[str, str] = field(default_factory=dict)  # in an order in which each finds what it needs
    _begun: set[str] = field(default_factory=set)

    def take(self, name: str, source: Path) -> None:
        """Add a name as our file `source` has it, what it stands on first."""
        node = _binding(name, source)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(OUR_KIT):
            self._take_from_kit(name, node)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            self.imports[name] = _one_import(name, node)
        elif name not in self._begun:
            self._begun.add(name)
            known = names.defined_in(source)
            for other in sorted(_names_in(node) & known.keys() - {name}):
                if not self._has(other):
                    self.take(other, source)
            self.definitions[name] = _text(node, source)

    def _take_from_kit(self, name: str, node: ast.ImportFrom) -> None:
        original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
        if source_of(f"{node.module}.{original}", PACKAGE.parent) is not None:
            raise _CannotGo(f"it stands on {node.module}.{original}, a module that PyTorch has not")
        if original != name:
            raise _CannotGo(f"it stands on {node.module}.{original} under another name, {name}")
        self.take(name, _source(node.module or ""))

    def _has(self, name: str) -> bool:
        """Has PyTorch's module this name, and does it mean the same? What our module has for the public does."""
        kind = names.defined_in(self.file).get(name)
        its_own = kind in (names.NameKind.CLASS, names.NameKind.FUNCTION, names.NameKind.VALUE)
        if its_own and name not in names.declared_in(self.mirror):
            raise _CannotGo(f"it needs our {name}, and {self.file.name} has a {name} of its own")
        return kind is not None or name in self._begun or name in self.imports or hasattr(builtins, name)

    def extended(self) -> bytes:
        """The module's text with the imports after its own and the definitions at its end."""
        text = self.file.read_bytes().decode()
        newline = "\r\n" if "\r\n" in text else "\n"
        lines = text.splitlines(keepends=True)
        imports = sorted(line for name, line in self.imports.items() if name not in names.defined_in(self.file))
        at = _end_of_imports(self.file)
        lines[at:at] = [line + newline for line in imports]
        added = "".join(f"\n\n{definition}\n" for definition in self.definitions.values())
        return ("".join(lines).rstrip() + "\n" + added).replace("\r\n", "\n").replace("\n", newline).encode()


def _binding(name: str, source: Path) -> ast.stmt:
    found = [node for node in names.statements(names.parse(source).body) if name in names.bound_by(node)]
    if not found:
        raise _CannotGo(f"{source.name} makes it only when it is asked for")
    return found[-1]


def _names_in(node: ast.stmt) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)}


def _one_import(name: str, node: ast.Import | ast.ImportFrom) -> str:
    chosen = [alias for alias in node.names if (alias.asname or alias.name.partition(".")[0]) == name]
    if isinstance(node, ast.Import):
        return ast.unparse(ast.Import(chosen))
    return ast.unparse(ast.ImportFrom(node.module, chosen, node.level))


def _text(node: ast.stmt, source: Path) -> str:
    lines = source.read_text(encoding="utf-8").splitlines()
    first = min([node.lineno, *(part.lineno for part in getattr(node, "decorator_list", []))])
    return "\n".join(lines[first - 1 : node.end_lineno])


def _end_of_imports(file: Path) -> int:
    """The line after the imports that the module begins with."""
    end = 0
    for node in names.parse(file).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            end = node.end_lineno or end
        elif not isinstance(node, ast.Expr):
            break
    return end
