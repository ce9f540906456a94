"""Guesses from the source at which line a rank left a test before a collective that others call.

A rank that returns leaves no trace of where. Known are the line of its last collective, and that of the first one
that it missed. Each way from one to the end of the test that does not lead over the other is a candidate. The
source alone does not show whether the rank took it, so messages say "probably".
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from torch_testing_ext._tests.source_files import source_tree

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_JUMPS = (ast.Break, ast.Continue, ast.Return)
_BRANCHES = (ast.If, ast.Match, *_LOOPS)


def probable_lines_of_exit(file: str, function: str, last: int | None, missed: int) -> list[int]:
    """Guess the lines at which a rank may have left `function` after the line `last`, and before the line `missed`."""
    tree = source_tree(file)
    if tree is None:
        return []
    around = [node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS) and _has(node, missed)]
    if not around or around[-1].name != function:
        return []
    return sorted(_Ways(around[-1], last, missed).exits())


def calls_that_exit(file: str, function: str) -> dict[int, str]:
    """The lines of calls that exit, in `function` or else in the whole file, each with the function that it is in."""
    tree = source_tree(file)
    if tree is None:
        return {}
    found: dict[int, str] = {}
    for scope in ast.walk(tree):
        # Inner functions come after those that they are in.
        if isinstance(scope, (ast.Module, *_FUNCTIONS)):
            lines = [node.lineno for node in ast.walk(scope) if isinstance(node, ast.Call) and _exits(node.func)]
            found.update(dict.fromkeys(lines, getattr(scope, "name", "<module>")))
    within = {line: name for line, name in found.items() if name == function}
    return dict(sorted((within or found).items()))


def _exits(called: ast.expr) -> bool:
    return ast.unparse(called) in ("os._exit", "_exit", "sys.exit", "exit", "quit", "SystemExit")


class _Ways:
    """The ways through a test from the line of a rank's last collective, if there is one, past the one it missed."""

    def __init__(self, test: Any, last: int | None, missed: int):
        self._blocks = list(_blocks(test))
        # Each statement comes after those that it is in.
        self._statements = [statement for block in self._blocks for statement in block]
        self._to_missed = [statement for statement in self._statements if _has(statement, missed)]
        self._start = test.lineno
        self._repeated: list[Any] = []
        if last is not None:
            to_last = [statement for statement in self._statements if _has(statement, last)]
            if to_last:
                self._start = last
            self._repeated = [statement for statement in to_last if isinstance(statement, _LOOPS)]

    def exits(self) -> Iterator[int]:
        """The lines of returns, and of branches and loops around the missed line that may have been left out.

        A loop with a `break`, `continue` or `return` before that line has been left there, as far as the source shows.
        """
        jumps = [line for jump in self._jumps() for line in self._if_passed(jump)]
        yield from jumps
        for statement in self._statements:
            if isinstance(statement, ast.Return):
                yield from (line for line in self._if_passed(statement) if line not in jumps)
                continue
            is_around_missed = isinstance(statement, _BRANCHES) and statement in self._to_missed[:-1]
            is_told = bool(jumps) and isinstance(statement, _LOOPS)
            if is_around_missed and not is_told and (statement.lineno > self._start or statement in self._repeated):
                yield statement.lineno

    def _jumps(self) -> Iterator[Any]:
        """The statements by which a pass of a loop around the missed line ends."""
        loops = [statement for statement in self._to_missed[:-1] if isinstance(statement, _LOOPS)]
        for statement in self._statements:
            if isinstance(statement, _JUMPS) and any(_has(loop, statement.lineno) for loop in loops):
                yield statement

    def _if_passed(self, statement: Any) -> Iterator[int]:
        """The line of a statement that a rank may have come to without the missed line."""
        line = statement.lineno
        is_repeated = any(_has(loop, line) for loop in self._repeated)
        if (line > self._start or is_repeated) and not any(_has(other, line) for other in self._behind_missed()):
            yield line

    def _behind_missed(self) -> list[Any]:
        """The statements after the missed line in its block: they end a rank only after it has come over that line."""
        if not self._to_missed:
            return []
        innermost = self._to_missed[-1]
        block = next(block for block in self._blocks if innermost in block)
        return block[block.index(innermost) + 1 :]


def _has(node: Any, line: int) -> bool:
    return bool(node.lineno <= line <= node.end_lineno)


def _blocks(node: Any) -> Iterator[list[Any]]:
    """The lists of statements below a node that are run with it, the outer ones first."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, [])
        if block:
            yield block
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for inner in getattr(node, name, []):
            if not isinstance(inner, (*_FUNCTIONS, ast.ClassDef)):
                yield from _blocks(inner)
