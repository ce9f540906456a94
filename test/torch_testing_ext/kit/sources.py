"""Reads the package's sources: which module imports which, the names of its classes, and its docstrings."""

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

# From the bottom up: a row may import its own modules and those of the rows before it. `MIRROR` is everything that has
# PyTorch's name: the modules of the package's root and `distributed/`.
MIRROR = "the mirror"
ROWS = (
    ("fault_points", "faults"),
    ("_torch",),
    ("_process",),
    ("_tests",),
    ("_collectives",),
    ("_machine",),
    ("launch",),
    ("_testing", "_testing.helpers"),
    ("_testing.marks",),
    ("_testing.bases",),
    ("_testing.sharded",),
    ("_hypothesis",),
    ("layouts",),
    ("_spmd",),
    (MIRROR,),
    ("upstream", "moving"),
    ("_pytest_ranks", "pytest_plugin"),
    ("compat",),
    ("runner", "__main__"),
)
ROW_OF = {folder: number for number, row in enumerate(ROWS) for folder in row}
LONGEST_SENTENCE = 120


def modules_below(package: Path) -> dict[str, Path]:
    """Each module of the package, by its dotted name."""
    found = {}
    for file in sorted(package.rglob("*.py")):
        parts = [package.name, *file.relative_to(package).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def folder_of(module: str) -> str:
    """The folder of house.md's table that holds a module."""
    parts = module.split(".")[1:]
    folders = (".".join(parts[:2]), ".".join(parts[:1]))
    return next((folder for folder in folders if folder in ROW_OF), MIRROR)


# -- imports


def imports_in(module: str, file: Path, known: Collection[str]) -> Iterator[tuple[str, int]]:
    """The modules of `known` that a module names: by any import, however deep, and in any string."""
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Import():
                names = [alias.name for alias in node.names]
            case ast.ImportFrom():
                above = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
                parent = ".".join(part for part in (above, node.module) if part)
                names = [f"{parent}.{alias.name}" for alias in node.names]
            case ast.Constant(value=str()):
                names = [node.value]
            case _:
                continue
        for name in names:
            # An entry point names its function after a colon.
            parts = name.replace(":", ".").split(".")
            heads = (".".join(parts[:length]) for length in range(len(parts), 1, -1))
            found = next((head for head in heads if head in known), None)
            if found is not None and found != module:
                yield found, getattr(node, "lineno", 0)


def absolute_imports(source: str) -> Iterator[tuple[str, int]]:
    """Each module that a source names in an absolute import, however deep, with the line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def code_of(source: str) -> str:
    """The source without comments and docstrings: a name in prose is not a dependency."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            first.value = ast.Constant(...)
    return ast.unparse(tree)


def cycles(graph: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Groups of modules that import one another, directly or not (Tarjan's strongly connected components)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for other in graph[node]:
            if other not in order:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], order[other])
        if low[node] == order[node]:
            cycle: list[str] = []
            while not cycle or cycle[-1] != node:
                cycle.append(stack.pop())
            if len(cycle) > 1:
                found.append(sorted(cycle))

    for node in graph:
        if node not in order:
            visit(node)
    return found


# -- names and docstrings


def public_classes(tree: ast.Module) -> list[ast.ClassDef]:
    """The classes that a module defines for others: outside functions and classes, even if under an `if` or a `try`."""
    found = []
    nodes = [*tree.body]
    for node in nodes:  # grows while it is read
        if isinstance(node, ast.ClassDef):
            found += [] if node.name.startswith("_") else [node]
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            nodes += ast.iter_child_nodes(node)
    return found


def shared_class_names(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """The names that public classes of several modules have, with these modules; `sources` are by module."""
    modules: dict[str, list[str]] = {}
    for module, source in sources.items():
        for name in sorted({each.name for each in public_classes(ast.parse(source))}):
            modules.setdefault(name, []).append(module)
    return {name: where for name, where in modules.items() if len(where) > 1}


def shared_basenames(modules: Mapping[str, Path]) -> dict[str, list[str]]:
    """The basenames that several files have, with their modules: all but `__init__` and `__main__`."""
    found: dict[str, list[str]] = {}
    for module, file in modules.items():
        if file.stem not in ("__init__", "__main__"):
            found.setdefault(file.stem, []).append(module)
    return {name: where for name, where in found.items() if len(where) > 1}


def poor_docstrings(module: str, source: str) -> dict[str, str]:
    """What is wrong with the docstrings of a module and its public classes, by dotted name."""
    tree = ast.parse(source)
    nodes = {module: tree, **{f"{module}.{each.name}": each for each in public_classes(tree)}}
    faults = {name: fault_of_docstring(ast.get_docstring(node)) for name, node in nodes.items()}
    return {name: fault for name, fault in faults.items() if fault is not None}


def fault_of_docstring(docstring: str | None) -> str | None:
    """Says why the first line is not one sentence of a readable length; None if it is."""
    first = (docstring or "").strip().partition("\n")[0].rstrip()
    if not first:
        return "no docstring"
    if not first.endswith("."):
        return f"the first line does not end with a full stop: {first!r}"
    if len(first) > LONGEST_SENTENCE:
        return f"the first line has {len(first)} characters, more than {LONGEST_SENTENCE}"
    return None


def shadowing_modules(modules: Collection[str], known: Collection[str]) -> list[str]:
    """The modules whose own name is one of `known`; the mirror is exempt, since PyTorch chose its names."""
    return [module for module in modules if module.rpartition(".")[2] in known and folder_of(module) != MIRROR]


# "Whether" is a question with an answer; these are clauses without a main one.
_HEADLESS = {"What", "Those", "Who", "Whose", "How", "Which", "Where", "When", "As"}
_QUESTION = re.compile(r"(Are|Can|Did|Do|Does|Has|Have|Is|May|Must|Should|Was|Were|Will|Would) [^.]*\?")


def headless_docstrings(source: str) -> Iterator[tuple[int, str]]:
    """The line and the first line of each docstring that begins with a clause or a question, and no verb or noun."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node) or ""
            if docstring and (docstring.split()[0].rstrip(",:.") in _HEADLESS or _QUESTION.match(docstring)):
                yield node.body[0].lineno, docstring.splitlines()[0]
