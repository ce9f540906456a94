"""Exceptions in flight: raised by the test, and not yet told, since a `finally` or an `__exit__` is still running."""

from __future__ import annotations

import ast
import functools
import sys
import threading
import traceback
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, NamedTuple

from torch_testing_ext._tests.source_files import source_tree
from torch_testing_ext.launch.causes import cause_of, led_to


def raised_by_itself(error: BaseException) -> BaseException:
    """The exception by which a rank has failed: for one that says that a peer is lost, the one in flight before it."""
    if not cause_of(error).is_of_peers:
        return error
    return next(_in_flight(error.__context__, error.__traceback__), error)


def of_main_thread() -> BaseException | None:
    """The exception that is in flight in the main thread now, seen from another thread."""
    handled = sys._current_exceptions().get(threading.main_thread().ident or 0)
    active = handled[1] if isinstance(handled, tuple) else handled
    return next(_in_flight(active, None), None)


def _in_flight(newest: BaseException | None, until: TracebackType | None) -> Iterator[BaseException]:
    """Of an exception and those before it, the ones that no `except` handles, the newest first."""
    for error in led_to(newest):
        where = error.__traceback__
        if where is None or not isinstance(error, Exception) or cause_of(error).is_of_peers:
            continue
        frame = where.tb_frame
        line = _line_of(frame, until)
        if not _is_handled(frame.f_code.co_filename, where.tb_lineno, line):
            yield error


def _line_of(frame: FrameType, until: TracebackType | None) -> int:
    """The line that a frame has come to: in the traceback of a later exception, or now."""
    for other, line in traceback.walk_tb(until):
        if other is frame:
            return line
    return frame.f_lineno


def _is_handled(file: str, raised: int, line: int) -> bool:
    """Whether an exception of the line `raised` is handled at `line`: in an `except` that does not raise again.

    True also where the source is not known.
    """
    clauses = _clauses_of(file)
    if clauses is None:
        return True
    around = [clause for clause in clauses if raised in clause.guarded and line in clause.lines]
    if not around:
        return False
    innermost = min(around, key=lambda clause: len(clause.lines))
    return innermost.handles


class _Clause(NamedTuple):
    """An `except` or a `finally`, and the lines that it guards."""

    guarded: range
    lines: range
    handles: bool = False


@functools.cache
def _clauses_of(file: str) -> list[_Clause] | None:
    tree = source_tree(file)
    if tree is None:
        return None
    return [clause for node in ast.walk(tree) for clause in _clauses(node)]


def _clauses(node: Any) -> Iterator[_Clause]:
    """Yield the clauses of a `try`, which has them all."""
    if not hasattr(node, "finalbody"):
        return
    for handler in node.handlers:
        raises_again = isinstance(handler.body[-1], ast.Raise)
        yield _Clause(_lines(*node.body), _lines(handler), handles=not raises_again)
    if node.finalbody:
        guarded = _lines(*node.body, *node.handlers, *node.orelse)
        yield _Clause(guarded, _lines(*node.finalbody))


def _lines(*nodes: Any) -> range:
    return range(nodes[0].lineno, nodes[-1].end_lineno + 1)
