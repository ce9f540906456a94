"""Append names that a patched test needs and PyTorch lacks to the helper module that mirrors ours.

A definition is copied together with the definitions and imports that it depends on. A definition that depends on a
whole module of ours, such as `launch`, is refused.
"""

import ast
import builtins
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from torch_testing_ext.upstream import defined_names
from torch_testing_ext.upstream.mapping import OUR_KIT, PACKAGE, Side, UserError, module_on, source_of

# Names that exist only here: what a file that is sent to PyTorch uses instead. The longest matching name counts.
INSTEAD = {
    f"{OUR_KIT}.common_distributed.Need": "PyTorch's ranks check what a test needs",
    f"{OUR_KIT}.common_distributed.RankError": "use RuntimeError, which it derives from",
    f"{OUR_KIT}.common_distributed.RankFailure": "use AssertionError, which it derives from",
    f"{OUR_KIT}.common_distributed.needs_of": "PyTorch's ranks check what a test needs",
    f"{OUR_KIT}.common_distributed.requires": "use skip_if_lt_x_gpu or another of PyTorch's decorators",
    f"{OUR_KIT}.common_distributed.skip_if_rocm": "use skip_if_rocm_multiprocess",
    f"{OUR_KIT}.hypothesis_utils": "use parametrize with explicit cases",
    f"{OUR_KIT}.launch": "use MultiProcessTestCase, which starts the ranks",
    f"{OUR_KIT}.distributed._spmd": "PyTorch removed the compiler in 2.5",
    OUR_KIT: "PyTorch has nothing like it",
}


class _CannotVendor(Exception):
    """Says why a definition cannot be copied."""


def appended(wanted: Iterable[str], checkout: Path) -> dict[Path, bytes]:
    """The checkout's helper modules with these names of ours (dotted) appended, by their paths in the checkout."""
    helpers: dict[str, _Helper] = {}
    problems = []
    for dotted in dict.fromkeys(wanted):
        try:
            module, _, name = dotted.rpartition(".")
            theirs = module_on(Side.THEIRS, module)
            file = source_of(theirs, checkout) if theirs else None
            if file is None:
                raise _CannotVendor("the checkout has no helper module for it")
            helpers.setdefault(module, _Helper(file, module, _source(module))).take(name, _source(module))
        except _CannotVendor as problem:
            problems.append(f"cannot vendor {dotted}: {problem}")
    if problems:
        raise UserError("\n".join(problems))
    return {helper.file.relative_to(checkout): helper.extended() for helper in helpers.values()}


def _source(module: str) -> Path:
    file = source_of(module, PACKAGE.parent)
    if file is None:
        raise _CannotVendor(f"{module} has no source file here")
    return file


@dataclass
class _Helper:
    """A module of PyTorch's, and what is to be added to it."""

    file: Path
    mirror: str  # our module that mirrors it
    mirror_source: Path
    imports: dict[str, str] = field(default_factory=dict)  # statement -> the name that it binds
    definitions: dict[str, str] = field(default_factory=dict)  # name -> code; dependencies come first
    _code: dict[str, str] = field(default_factory=dict)  # of each name that was taken or is being taken

    def take(self, name: str, source: Path) -> None:
        """Add a name as it is defined in our file `source`, after everything that it depends on."""
        node = _binding(name, source)
        if isinstance(node, ast.ImportFrom) and (module := imported_module(node, source)).startswith(OUR_KIT):
            self._take_from_kit(name, node, module)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            statement = _one_import(name, node)
            self._check_unique(name, name if statement.startswith(f"import {name}") else statement)
            self.imports[statement] = name
        else:
            begun, code = name in self._code, _text(node, source)
            self._check_unique(name, code)
            if not begun:
                self._take_dependencies(name, node, source)
                self.definitions[name] = code

    def _take_dependencies(self, name: str, node: ast.stmt, source: Path) -> None:
        for other in sorted(_names_in(node) & defined_names.defined_in(source).keys() - {name}):
            if not self._has(other):
                self.take(other, source)

    def _check_unique(self, name: str, code: str) -> None:
        """Two of our modules may use one name for different things; a single helper module cannot."""
        if self._code.setdefault(name, code) != code:
            raise _CannotVendor(f"it depends on two different definitions of {name}")

    def _take_from_kit(self, name: str, node: ast.ImportFrom, module: str) -> None:
        """Follow an import from another module of ours to the definition."""
        original = next((alias.name for alias in node.names if (alias.asname or alias.name) == name), name)
        if source_of(f"{module}.{original}", PACKAGE.parent) is not None:
            raise _CannotVendor(f"it depends on {module}.{original}, a module that PyTorch does not have")
        if original != name:
            raise _CannotVendor(f"it depends on {module}.{original} under another name, {name}")
        self.take(name, _source(module))

    def _has(self, name: str) -> bool:
        """Whether PyTorch's module has this name with the same meaning."""
        kind = defined_names.defined_in(self.file).get(name)
        its_own = kind in (defined_names.NameKind.CLASS, defined_names.NameKind.FUNCTION, defined_names.NameKind.VALUE)
        if its_own and not self._is_mirrored(name):
            raise _CannotVendor(f"it needs our {name}, but {self.file.name} defines another {name}")
        return kind is not None or hasattr(builtins, name)

    def _is_mirrored(self, name: str) -> bool:
        """Whether our mirror module offers this name as PyTorch's."""
        ours = reexported_in(self.mirror_source) | defined_names.defined_in(self.mirror_source).keys()
        return name in ours and f"{self.mirror}.{name}" not in INSTEAD

    def extended(self) -> bytes:
        """The module's text, with the new imports after its own imports and the definitions at its end."""
        text = self.file.read_bytes().decode()
        newline = "\r\n" if "\r\n" in text else "\n"
        lines = text.splitlines(keepends=True)
        known = defined_names.defined_in(self.file)
        at = _end_of_imports(self.file)
        lines[at:at] = [statement + newline for statement, name in sorted(self.imports.items()) if name not in known]
        added = "".join(f"\n\n{definition}\n" for definition in self.definitions.values())
        return ("".join(lines).rstrip() + "\n" + added).replace("\r\n", "\n").replace("\n", newline).encode()


def _binding(name: str, source: Path) -> ast.stmt:
    """The statement that gives a name its value, or that imports it."""
    statements = list(defined_names.statements(defined_names.parse_source(source).body))
    found = [node for node in statements if name in dict(defined_names.bound_by(node)) and not _only_declares(node)]
    found = found or [node for node in statements if isinstance(node, ast.ImportFrom) and _by_star(name, node, source)]
    if not found:
        raise _CannotVendor(f"{source.name} computes it on first use")
    return found[-1]


def _only_declares(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) and node.value is None


def _by_star(name: str, node: ast.ImportFrom, source: Path) -> bool:
    home = star_source(node, source)
    return home is not None and name in public_in(home) | reexported_in(home)


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
    for node in defined_names.parse_source(file).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            end = node.end_lineno or end
        elif not isinstance(node, ast.Expr):
            break
    return end


# -- the names of our modules


def public_in(file: Path) -> set[str]:
    """The public names that a module defines itself."""
    imported = (defined_names.NameKind.REEXPORTED, defined_names.NameKind.IMPORTED)
    return {
        name
        for name, kind in defined_names.defined_in(file).items()
        if kind not in imported and not name.startswith("_")
    }


def reexported_in(file: Path) -> set[str]:
    """The names that a module of ours re-exports: `from x import name as name`, or `from x import *` within our kit."""
    imports = [
        node
        for node in defined_names.statements(defined_names.parse_source(file).body)
        if isinstance(node, ast.ImportFrom)
    ]
    explicit = {alias.name for node in imports for alias in node.names if alias.asname == alias.name}
    return explicit.union(*(public_in(source) for node in imports if (source := star_source(node, file))))


def star_source(node: ast.ImportFrom, file: Path) -> Path | None:
    """The module that a `from x import *` in our `file` imports, if it is one of ours; None for other statements."""
    is_star = [alias.name for alias in node.names] == ["*"]
    return source_of(imported_module(node, file), PACKAGE.parent) if is_star else None


def imported_module(node: ast.ImportFrom, file: Path) -> str:
    """The absolute name of the module that a `from` statement in our `file` imports from."""
    if not node.level:
        return node.module or ""
    package = file.relative_to(PACKAGE.parent).parts[: -node.level]
    return ".".join([*package, *filter(None, [node.module])])
