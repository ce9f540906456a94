"""Reads faults as a program writes them: `kill, stop(2)`, or `kill(rank=1, at=call(2))`."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable
from typing import Any

from . import kinds, points
from .kinds import PlannedFault
from .points import Point

_FAULTS: dict[str, Callable[..., PlannedFault]] = {
    made.__name__: made
    for made in (
        *(kinds.kill, kinds.segv, kinds.abort, kinds.exits),
        *(kinds.raises, kinds.stop, kinds.slow, kinds.hold_gil),
    )
}
_POINTS: dict[str, Callable[..., Point]] = {
    made.__name__: made for made in (points.call, points.store, points.step, points.mark)
}
KINDS = tuple(_FAULTS)


def faults_of_text(text: str) -> tuple[PlannedFault, ...]:
    """Read faults that are separated by commas; one without values needs no parentheses. Raises ValueError."""
    try:
        written = ast.parse(f"({text.strip()},)", mode="eval").body
    except SyntaxError:
        raise _unreadable(text) from None
    if not isinstance(written, ast.Tuple) or not written.elts:
        raise _unreadable(text)
    return tuple(map(_fault, written.elts))


def fault_of_text(text: str) -> PlannedFault:
    """Read one fault. Raises ValueError."""
    read = faults_of_text(text)
    if len(read) != 1:
        raise _unreadable(text)
    return read[0]


def _unreadable(text: str) -> ValueError:
    return ValueError(f"{text!r} is not a fault, such as kill, stop(2) or kill(rank=1, at=call(2))")


def _fault(written: ast.expr) -> PlannedFault:
    if isinstance(written, ast.Name):
        written = ast.Call(written, [], [])
    if not isinstance(written, ast.Call) or not isinstance(written.func, ast.Name):
        raise _unreadable(ast.unparse(written))
    if written.func.id not in _FAULTS:
        raise ValueError(f"{written.func.id!r} is not a fault; known are {', '.join(KINDS)}")
    fault: PlannedFault = _made(written, _FAULTS[written.func.id], _value_of_fault)
    return fault


def _made(written: ast.Call, make: Callable[..., Any], value_of: Callable[[ast.expr], Any]) -> Any:
    """The result of a function for the values of a call."""
    values = [value_of(each) for each in written.args]
    keywords = {each.arg: value_of(each.value) for each in written.keywords if each.arg is not None}
    try:
        return make(*values, **keywords)
    except TypeError as error:
        raise ValueError(f"{ast.unparse(written)}: {error}") from None


def _value_of_fault(written: ast.expr) -> Any:
    match written:
        case ast.Call(ast.Name(name)) if name in _POINTS:
            return _made(written, _POINTS[name], _constant)
        case ast.Name(name):
            return _exception(name)
    return _constant(written)


def _exception(name: str) -> type[Exception]:
    error = getattr(builtins, name, None)
    if not (isinstance(error, type) and issubclass(error, Exception)):
        raise ValueError(f"{name!r} is not an exception of Python, such as OSError, nor another value")
    return error


def _constant(written: ast.expr) -> Any:
    try:
        return ast.literal_eval(written)
    except ValueError:
        raise _unreadable(ast.unparse(written)) from None
