"""Counts how much there is to own in the package: what a change touches, what a story opens, and what is private.

    python docs/tools/house.py [--check] [PACKAGE]

Prints a table of counts. With --check, it compares them with the limits below, and exits with 1 if one is exceeded.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch_names

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "torch_testing_ext"
# The page with the stories: what runs between a fault and the message about it.
TOUR = ROOT / "docs" / "contribute" / "architecture.md"

# By aspect of a test: the beginnings of its words, as regular expressions.
ASPECTS: Mapping[str, Sequence[str]] = {
    "sweeps": ("drill", "sweep"),
    "faults": ("fault",),
    "the sanitizer": ("sanitize",),
    # Every test in ranks has a world_size.
    "worlds": ("world(?!_size)",),
    "the debugger": ("debug",),
}
STORIES = ("A rank raises", "A worker is killed", "A function with `world_size` fails")

# The most that each count may be. Lower a limit when the package has become better; never raise one. The tour
# has those of the stories, next to their files.
LIMITS: Mapping[str, int] = {
    "files that name sweeps": 15,
    "files that name faults": 69,
    "files that name the sanitizer": 60,
    "files that name worlds": 89,
    "files that name the debugger": 28,
    "modules that make attempts of tests": 2,
    "hosts with a judge of their own": 4,
    "sections under a ruler": 0,
    "global statements": 10,
    "files outside _torch/ that know torch's inside": 0,
    "syntax nodes": 585_200,
}

# A title between two rulers, or after a short one.
SECTION = re.compile(r"^# ?[-=]{10,}\n# .+\n|^# -- .+$", re.MULTILINE)
# A row of a story.
ROW = re.compile(r"^\| `([\w/]+\.py)` \|", re.MULTILINE)


@dataclass(frozen=True)
class Source:
    """A file with its syntax tree; `name` is its path in the package."""

    name: str
    text: str
    tree: ast.Module


def read(package: Path) -> list[Source]:
    """The files of a package."""
    sources = []
    for file in sorted(package.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        sources.append(Source(file.relative_to(package).as_posix(), text, ast.parse(text)))
    return sources


def count(sources: Sequence[Source], tour: str) -> dict[str, int]:
    """All counts of a package with these files, whose stories are told on the page `tour`."""
    counts = {
        f"files that name {aspect}": sum(names(source, words) for source in sources)
        for aspect, words in ASPECTS.items()
    }
    lines = {source.name: len(source.text.splitlines()) for source in sources}
    for story in STORIES:
        files = files_of_story(tour, story)
        counts[f"files of the story {story!r}"] = len(files)
        counts[f"lines of the story {story!r}"] = sum(lines.get(file, 0) for file in files)
    nodes = [node for source in sources for node in ast.walk(source.tree)]
    return counts | {
        "modules that make attempts of tests": sum(makes_attempts(source) for source in sources),
        "hosts with a judge of their own": sum(judges_attempts(node) for node in nodes),
        "sections under a ruler": sum(len(SECTION.findall(source.text)) for source in sources),
        "global statements": sum(isinstance(node, ast.Global) for node in nodes),
        f"files outside {torch_names.KNOWS_TORCH} that know torch's inside": len(
            {line.partition(":")[0] for line in torch_names.outside({source.name: source.tree for source in sources})}
        ),
        "syntax nodes": len(nodes),
    }


def names(source: Source, words: Sequence[str]) -> bool:
    """Whether a word of the file begins with one of `words`, also after an underscore."""
    return re.search(rf"\b_?(?:{'|'.join(words)})", source.text) is not None


def files_of_story(tour: str, story: str) -> set[str]:
    """The files in the table of a story."""
    section = re.split(r"^#+ ", tour.partition(f"# {story}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    return {*ROW.findall(section)}


def makes_attempts(source: Source) -> bool:
    """Whether a module makes attempts of tests in ranks, as the session does."""
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "RankAttempt"
        for node in ast.walk(source.tree)
    )


def judges_attempts(node: ast.AST) -> bool:
    """Whether a node is a class that inherits, and overrides `judge` of a host."""
    if not isinstance(node, ast.ClassDef) or not node.bases:
        return False
    methods = [method for method in node.body if isinstance(method, ast.FunctionDef) and method.name == "judge"]
    return any([argument.arg for argument in method.args.args] == ["self", "attempt"] for method in methods)


def exceeded(counts: Mapping[str, int], limits: Mapping[str, int] = LIMITS) -> Iterator[str]:
    """A sentence for each limit that a package exceeds."""
    for name, most in limits.items():
        if counts[name] > most:
            yield f"{name}: {counts[name]:,}, more than {most:,}"


def main(words: Sequence[str] | None = None) -> int:
    """Print the counts; with --check, compare them with the limits."""
    parser = argparse.ArgumentParser(prog="python docs/tools/house.py", description=__doc__.partition("\n")[0])
    parser.add_argument("package", metavar="PACKAGE", nargs="?", type=Path, default=PACKAGE)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a limit is exceeded")
    options = parser.parse_args(words)
    counts = count(read(options.package), TOUR.read_text(encoding="utf-8"))
    width = max(map(len, counts))
    print(*(f"{name:{width}} {number:>9,}" for name, number in counts.items()), sep="\n")
    if not options.check:
        return 0
    sentences = [*exceeded(counts)]
    print(*sentences, sep="\n", end="\n" if sentences else "")
    return int(bool(sentences))


if __name__ == "__main__":
    sys.exit(main())
