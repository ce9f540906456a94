"""Counts what a reader of the package meets: files, imports, density, rooms, and what is large.

    python docs/tools/house.py [--check] [PACKAGE]

Prints for the package how many files, lines and imports it has, and its largest classes and functions. With --check, it
compares the counts with the limits below, and exits with 1 if one is exceeded.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "torch_testing_ext"


# The most that each count may be. Lower a limit when the package has become better; never raise one.
LIMITS: Mapping[str, float] = {
    "nodes on a line of code": 9.9,
    "rooms": 15,
}

# What is worth a look: sizes above these are listed.
MOST_METHODS = 20
MOST_ATTRIBUTES = 12
MOST_LINES_OF_FUNCTION = 45

MIRROR = "PyTorch's names"


@dataclass(frozen=True)
class Source:
    """A file with its syntax tree; `name` is its path in the package."""

    name: str
    text: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def room(self) -> str | None:
        """The top-level folder; one for all modules that have PyTorch's names; None for other files at the root."""
        folder, below, _ = self.name.partition("/")
        if folder.startswith("common_") or folder in (
            "distributed",
            "two_tensor.py",
            "hypothesis_utils.py",
            "ranks.py",
        ):
            return MIRROR
        return folder if below else None


@dataclass(frozen=True)
class House:
    """All that is counted in a package."""

    counts: dict[str, float]
    rooms: list[str]
    large: list[str]


def read(package: Path) -> list[Source]:
    """The files of a package."""
    sources = []
    for file in sorted(package.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        sources.append(Source(file.relative_to(package).as_posix(), text, ast.parse(text)))
    return sources


def count(sources: Sequence[Source]) -> House:
    """Count files, lines, imports, nodes and rooms, and list classes and functions that are large."""
    nodes = [node for source in sources for node in ast.walk(source.tree)]
    lines = sum(source.lines for source in sources)
    imports = sum(isinstance(node, (ast.Import, ast.ImportFrom)) for node in nodes)
    lines_of_code = sum(len(list(code_of(source))) for source in sources)
    rooms = sorted({source.room for source in sources if source.room is not None})
    counts = {
        "files": len(sources),
        "lines": lines,
        "lines a file": lines / max(1, len(sources)),
        "lines of the longest file": max((source.lines for source in sources), default=0),
        "lines of code": lines_of_code,
        "imports per 1,000 lines": 1000 * imports / max(1, lines),
        "nodes on a line of code": len(nodes) / max(1, lines_of_code),
        "rooms": len(rooms),
    }
    return House(counts, rooms, [line for source in sources for line in large_in(source)])


def code_of(source: Source) -> Iterator[int]:
    """The numbers of the lines that are neither blank nor a comment nor part of a docstring."""
    docstrings: set[int] = set()
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    for number, line in enumerate(source.text.splitlines(), 1):
        if line.strip() and not line.strip().startswith("#") and number not in docstrings:
            yield number


def large_in(source: Source) -> Iterator[str]:
    """A line for each class with many methods or attributes, and for each long function."""
    for node in ast.walk(source.tree):
        match node:
            case ast.ClassDef():
                methods, attributes = len(methods_of(node)), len(attributes_of(node))
                if methods > MOST_METHODS or attributes > MOST_ATTRIBUTES:
                    yield f"{source.name}:{node.lineno} {node.name}: {methods} methods, {attributes} attributes"
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > MOST_LINES_OF_FUNCTION:
                    yield f"{source.name}:{node.lineno} {node.name}: {lines} lines"


def methods_of(node: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions that a class defines."""
    return [function for function in node.body if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))]


def attributes_of(node: ast.ClassDef) -> set[str]:
    """The fields that a class declares, and what its methods assign to `self`."""
    names = {
        statement.target.id
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
    for method in methods_of(node):
        first = next((argument.arg for argument in [*method.args.posonlyargs, *method.args.args]), None)
        for part in ast.walk(method):
            match part:
                case ast.Attribute(ast.Name(owner), name, ast.Store()) if owner == first:
                    names.add(name)
    return names


def report(house: House) -> Iterator[str]:
    """The counts as text, the rooms, and what is large."""
    for name, value in house.counts.items():
        yield f"{name}: {_number(value)}"
    yield f"  {', '.join(house.rooms)}"
    yield (
        f"classes of more than {MOST_METHODS} methods or {MOST_ATTRIBUTES} attributes, "
        f"functions of more than {MOST_LINES_OF_FUNCTION} lines: {len(house.large)}"
    )
    yield from (f"  {line}" for line in house.large)


def exceeded(house: House, limits: Mapping[str, float] = LIMITS) -> Iterator[str]:
    """A sentence for each limit that a package exceeds."""
    for name, most in limits.items():
        value = house.counts[name]
        if value > most:
            yield f"{name}: {_number(value)}, more than {_number(most)}"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}".rstrip("0").rstrip(".")


def main(words: Sequence[str] | None = None) -> int:
    """Print the counts; with --check, compare them with the limits."""
    parser = argparse.ArgumentParser(prog="python docs/tools/house.py", description=__doc__.partition("\n")[0])
    parser.add_argument("package", metavar="PACKAGE", nargs="?", type=Path, default=PACKAGE)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a limit is exceeded")
    options = parser.parse_args(words)
    house = count(read(options.package))
    print(*report(house), sep="\n")
    if not options.check:
        return 0
    sentences = [*exceeded(house)]
    print(*sentences, sep="\n", end="\n" if sentences else "")
    return int(bool(sentences))


if __name__ == "__main__":
    sys.exit(main())
