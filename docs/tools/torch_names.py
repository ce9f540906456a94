"""Finds what a file knows of torch's inside, which only `torch_testing_ext/_torch/` may know.

    python docs/tools/torch_names.py [PACKAGE]

Prints a line for each private name of torch, each function of torch that is replaced, and each text of an error outside
of that folder, and exits with 1 if there is one.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parents[2] / "torch_testing_ext"
# The only folder that may know torch's inside.
KNOWS_TORCH = "_torch/"

# Private names of others than torch, by owner. What a file defines itself needs no row.
OF_OTHERS: Mapping[str, frozenset[str]] = {
    "unittest": frozenset(
        (
            *("_ErrorHolder", "_class_cleanups", "_cleanups", "_moduleSetUpFailed", "_module_cleanups"),
            *("_previousTestClass", "_subDescription", "_testFunc", "_testMethodName"),
        )
    ),
    "multiprocessing": frozenset(
        ("_children", "_fd", "_finalizer_registry", "_resource_tracker", "_run_after_forkers", "_run_finalizers")
    ),
    "asyncio": frozenset(("_scheduled", "_selector", "_ssock")),
    "threading": frozenset(("_target",)),
    "named tuples": frozenset(("_replace",)),
    # Attributes that bases of tests have for the modules beside theirs.
    "this package": frozenset(
        (
            *("_collectives_may_differ", "_decides_about_skips", "_error", "_exception", "_interruptible"),
            *("_current_test_name", "_handle_test_skip", "_known_skip", "_min_gpus_required", "_overrides"),
            *("_required_world_size", "_result", "_timeout", "_with_expectations"),
        )
    ),
}
_ALLOWED = frozenset().union(*OF_OTHERS.values())
# Files that are about private names: those of pytest, and those of the modules of PyTorch's own test kit.
EXEMPT = ("_pytest_ranks/pytest_internals.py", "upstream/mapping.py")
# The functions that set, or replace, an attribute of their first argument.
_SETTERS = ("setattr", "delattr", "patch.object", "patch.multiple")
# Settings of torch: their values are no functions.
_SETTINGS = ("allow_tf32", "fill_uninitialized_memory", "fp32_precision")
_DOTTED = re.compile(r"torch(\.\w+)*\._[A-Za-z]\w*[\w.]*")


class Finding(NamedTuple):
    """Something that a file knows of torch. `what`: the kind and the name."""

    line: int
    what: str


def findings(tree: ast.Module) -> Iterator[Finding]:
    """What a file knows of torch's inside."""
    names = _Names(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Import() | ast.ImportFrom():
                yield from (Finding(node.lineno, f"imports {name}") for name in imported(node) if is_private(name))
            case ast.Attribute() if names.is_private_of_torch(node):
                yield Finding(node.lineno, f"uses {ast.unparse(node)}")
            case ast.Constant(value=str(text)) if _DOTTED.fullmatch(text):
                yield Finding(node.lineno, f"names {text}")
            case ast.Call(args=[first, ast.Constant(value=str(name)), *_]) if is_private(name) and _gets(node):
                if name not in names.own | _ALLOWED:
                    yield Finding(node.lineno, f"uses {name} of {ast.unparse(first)}")
            case ast.Call(args=[first, *_]) if names.is_of_torch(first) and _sets(node):
                yield Finding(node.lineno, f"replaces a part of {ast.unparse(first)}")
            case ast.ExceptHandler(name=str(error)):
                yield from _texts_of(error, node)
    for target in _targets(tree):
        if names.is_of_torch(target.value) and target.attr not in _SETTINGS:
            yield Finding(target.lineno, f"replaces {ast.unparse(target)}")


def imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """The names of torch that a statement imports."""
    if isinstance(node, ast.Import):
        found = [alias.name for alias in node.names]
    else:
        found = [] if node.level else [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in found if name.partition(".")[0] == "torch"]


def is_private(dotted: str) -> bool:
    """Whether a part of a dotted name is private."""
    return any(part.startswith("_") and not part.endswith("__") for part in dotted.split("."))


class _Names:
    """The names of a file: those that lead to torch, those that lead elsewhere, and those that it defines."""

    def __init__(self, tree: ast.Module):
        self._of_torch: set[str] = set()
        self._of_others: set[str] = set()
        self.own: set[str] = set()
        for node in ast.walk(tree):
            match node:
                case ast.Import() | ast.ImportFrom():
                    self._note_import(node)
                case ast.FunctionDef(name) | ast.ClassDef(name) | ast.AsyncFunctionDef(name):
                    self.own.add(name)
                case ast.Name(name, ast.Store()) | ast.Attribute(ast.Name("self" | "cls"), name, ast.Store()):
                    self.own.add(name)
        for node in ast.walk(tree):
            match node:
                case ast.Assign([ast.Name(name)], value) | ast.AnnAssign(ast.Name(name), value=ast.expr() as value):
                    if isinstance(value, (ast.Name, ast.Attribute)) and self.is_of_torch(value):
                        self._of_torch.add(name)

    def _note_import(self, node: ast.Import | ast.ImportFrom) -> None:
        is_here = isinstance(node, ast.ImportFrom) and (node.level > 0 or node.module == "torch_testing_ext")
        for alias in node.names:
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else alias.name
            name = alias.asname or alias.name.partition(".")[0]
            top = module.partition(".")[0]
            if top == "torch" and not is_here:
                self._of_torch.add(name)
            elif top != "torch_testing_ext" and not is_here:
                self._of_others.add(name)

    def is_of_torch(self, node: ast.expr) -> bool:
        """Whether an expression begins at a name of torch: `dist.Store`, `getattr(torch, name).cuda`."""
        return _root(node) in self._of_torch

    def is_private_of_torch(self, node: ast.Attribute) -> bool:
        """Whether this takes a private name that may be torch's: neither the file's own nor that of another package."""
        if not is_private(node.attr) or _root(node) in self._of_others:
            return False
        if self.is_of_torch(node):
            return True
        is_own_object = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        is_of_base = isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()"
        return not (is_own_object or is_of_base or node.attr in self.own or node.attr in _ALLOWED)


def _root(node: ast.AST) -> str:
    """The name at which an expression begins."""
    while True:
        match node:
            case ast.Call(ast.Name("getattr" | "vars"), [first, *_]):
                node = first
            case ast.Attribute(value) | ast.Subscript(value):
                node = value
            case ast.Call(func):
                node = func
            case ast.Name(name):
                return name
            case _:
                return ""


def _gets(call: ast.Call) -> bool:
    return ast.unparse(call.func).split(".")[-1] in ("getattr", "hasattr", "setattr", "delattr")


def _sets(call: ast.Call) -> bool:
    return ast.unparse(call.func).endswith(_SETTERS)


def _targets(tree: ast.Module) -> Iterator[ast.Attribute]:
    """The attributes that are assigned or deleted."""
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, (ast.Assign, ast.Delete)) else []
        if isinstance(node, (ast.AnnAssign, ast.AugAssign)):
            targets = [node.target]
        yield from (target for target in targets if isinstance(target, ast.Attribute))


def _texts_of(error: str, handler: ast.ExceptHandler) -> Iterator[Finding]:
    """The texts that a handler looks for in its error."""
    for node in ast.walk(handler):
        if not isinstance(node, ast.Compare) or not isinstance(node.ops[0], (ast.In, ast.NotIn)):
            continue
        text = ast.unparse(node)
        if f"str({error})" in text:
            yield Finding(node.lineno, f"reads the text of an error: {text}")


def outside(sources: Mapping[str, ast.Module]) -> Iterator[str]:
    """A line for each thing that files outside of the folder know; `sources` are trees by path in the package."""
    for name, tree in sources.items():
        if not name.startswith(KNOWS_TORCH) and name not in EXEMPT:
            yield from (f"{name}:{finding.line} {finding.what}" for finding in findings(tree))


def main(words: Sequence[str]) -> int:
    """Print what the package knows outside of the folder."""
    package = Path(words[0]) if words else PACKAGE
    files = sorted(package.rglob("*.py"))
    trees = {file.relative_to(package).as_posix(): ast.parse(file.read_text(encoding="utf-8")) for file in files}
    lines = [*outside(trees)]
    print(*lines, sep="\n", end="\n" if lines else "")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
