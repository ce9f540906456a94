"""Which module imports which, read from the sources: by any import statement, however deep, and by any string."""

import ast

PACKAGE_NAME = "torch_testing_ext"
# From the bottom up: a row may import its own modules and those of the rows before it. `MIRROR` is everything that has
# PyTorch's name: the modules of the package's root and `distributed/`.
MIRROR = "the mirror"
ROWS = (
    ("_torch",),
    ("_process",),
    ("_machine",),
    ("_utils",),
    ("_marks",),
    ("_asserts",),
    ("launch",),
    ("_threads",),
    ("_cases",),
    ("_fsdp", "_dtensor"),
    ("_hypothesis",),
    ("_spmd",),
    (MIRROR,),
    ("upstream",),
    ("runner",),
    ("pytest_plugin",),
)
ROW_OF = {folder: number for number, row in enumerate(ROWS) for folder in row}


def modules_below(package):
    """Each module of the package, by its dotted name."""
    found = {}
    for file in sorted(package.rglob("*.py")):
        parts = [package.name, *file.relative_to(package).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports_in(module, file, known):
    """The modules of `known` that a module names: by any import, however deep, and in any string."""
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Import():
                names = [alias.name for alias in node.names]
            case ast.ImportFrom():
                above = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
                home = ".".join(part for part in (above, node.module) if part)
                names = [f"{home}.{alias.name}" for alias in node.names]
            case ast.Constant(value=str()):
                names = [node.value]
            case _:
                continue
        for name in names:
            parts = name.split(".")
            heads = (".".join(parts[:length]) for length in range(len(parts), 1, -1))
            found = next((head for head in heads if head in known), None)
            if found is not None and found != module:
                yield found, getattr(node, "lineno", 0)


def folder_of(module):
    first = module.split(".")[1] if "." in module else ""
    return first if first in ROW_OF else MIRROR


def circles(graph):
    """Modules that import one another, directly or by way of others (Tarjan's strongly connected components)."""
    order, low, stack, found = {}, {}, [], []

    def visit(node):
        order[node] = low[node] = len(order)
        stack.append(node)
        for other in graph[node]:
            if other not in order:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], order[other])
        if low[node] == order[node]:
            circle = []
            while not circle or circle[-1] != node:
                circle.append(stack.pop())
            if len(circle) > 1:
                found.append(sorted(circle))

    for node in graph:
        if node not in order:
            visit(node)
    return found
