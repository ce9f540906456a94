"""Finds the line at which a rank left a test before a collective that others call, from the source.

A rank that returns leaves no trace of where. What is known: the line of its last collective, and that of the first one
that it missed. Each way from one to the end of the test that does not lead over the other is a candidate.
"""

import ast
from collections.abc import Iterator
from typing import Any

from torch_testing_ext._process.whole_files import source_tree

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)


def lines_of_exit(file: str, function: str, last: int | None, missed: int) -> list[int]:
    """The lines at which a rank may have left `function` after the line `last`, and before the line `missed`."""
    if (tree := source_tree(file)) is None:
        return []
    around = [node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS) and _has(node, missed)]
    if not around or around[-1].name != function:
        return []
    test = around[-1]
    blocks = list(_blocks(test))
    statements = [one for block in blocks for one in block]  # each after those that it is in
    way = [one for one in statements if _has(one, missed)]
    before = [one for one in statements if last is not None and _has(one, last)]
    start = last if before and last is not None else test.lineno
    repeated = [one for one in before if isinstance(one, _LOOPS)]
    # One of these ends a rank only after it has come over the missed line.
    later: list[Any] = []
    for block in blocks:
        if way and way[-1] in block:
            later = block[block.index(way[-1]) + 1 :]
    found = set()
    for one in statements:
        is_later = one.lineno > start
        if isinstance(one, ast.Return):
            is_later = is_later or any(_has(loop, one.lineno) for loop in repeated)
            if is_later and not any(_has(other, one.lineno) for other in later):
                found.add(one.lineno)
        elif isinstance(one, (ast.If, ast.Match, *_LOOPS)) and one in way[:-1] and (is_later or one in repeated):
            found.add(one.lineno)
    return sorted(found)


def _has(node: Any, line: int) -> bool:
    return bool(node.lineno <= line <= node.end_lineno)


def _blocks(node: Any) -> Iterator[list[Any]]:
    """The lists of statements below a node that are run with it, the outer ones first."""
    for name in ("body", "orelse", "finalbody"):
        if block := getattr(node, name, []):
            yield block
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for inner in getattr(node, name, []):
            if not isinstance(inner, (*_FUNCTIONS, ast.ClassDef)):
                yield from _blocks(inner)
