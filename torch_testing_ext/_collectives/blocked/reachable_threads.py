"""Threads that can reach torch.distributed from their stack: one that cannot never issues a collective.

The search follows variables, closures, attributes and the names that functions use. Functions of the standard library
and of torch count as harmless by themselves. What is too large to search counts as one that can.
"""

from __future__ import annotations

import gc
import inspect
import sys
import threading
import types
from collections.abc import Iterator, Mapping
from typing import Any

from torch_testing_ext._process.code_names import names_in

_MOST_OBJECTS = 20_000
# The parts of torch's modules that may issue a collective, and the functions that end the process.
_OF_TORCH = ("distributed", "parallel")
_ENDING = ("_exit", "abort", "kill", "pthread_kill", "raise_signal")
# The hook for exceptions of a thread, which may be ours.
_HOOK = "_invoke_excepthook"
_PLAIN = (str, bytes, int, float, complex, type(None), types.BuiltinFunctionType)


def can_reach(frame: types.FrameType | None) -> bool:
    """Whether the thread with this innermost frame can reach torch.distributed."""
    left: list[Any] = []
    while frame is not None:
        left += variables_of(frame)
        if not _is_harmless(str(frame.f_globals.get("__name__", ""))):
            left += _named(frame.f_code, frame.f_globals)
        frame = frame.f_back
    seen: set[int] = set()
    while left:
        value = left.pop()
        is_plain = isinstance(value, _PLAIN) and getattr(value, "__name__", "") not in _ENDING
        if is_plain or id(value) in seen:
            continue
        if len(seen) >= _MOST_OBJECTS or _is_forbidden(value):
            return True
        seen.add(id(value))
        left += _next(value)
    return False


def variables_of(frame: types.FrameType) -> list[Any]:
    """The variables of a function that runs."""
    return [value for _, value in variables_by_name(frame)]


def variables_by_name(frame: types.FrameType) -> list[tuple[str, Any]]:
    """The variables of a function that runs. No copy of them is left behind, which would keep objects alive."""
    variables = frame.f_locals
    named = list(variables.items())
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        variables.clear()
    return named


def _named(code: types.CodeType, names: Mapping[str, Any]) -> Iterator[Any]:
    """Yield all that the names in a function's code lead to: globals, attributes of modules, imported modules."""
    used = names_in(code)
    modules = []
    for name in used:
        if name in names:
            yield names[name]
        for value in (names.get(name), sys.modules.get(name)):
            if isinstance(value, types.ModuleType):
                modules.append(value)
    known: set[int] = set()
    while modules:
        module = modules.pop()
        known.add(id(module))
        yield module
        for name in used & vars(module).keys():
            value = vars(module)[name]
            yield value
            if isinstance(value, types.ModuleType) and id(value) not in known:
                modules.append(value)


def _next(value: Any) -> list[Any]:
    """The objects that a value leads to in one step."""
    if isinstance(value, types.ModuleType):
        # Its names are followed where they are used.
        return []
    if isinstance(value, types.FunctionType):
        reached = [cell.cell_contents for cell in value.__closure__ or () if not _is_empty(cell)]
        reached += value.__defaults__ or ()
        if not _is_harmless(value.__module__ or ""):
            reached += _named(value.__code__, value.__globals__)
        return reached
    if isinstance(value, threading.Thread):
        attributes = [attribute for name, attribute in vars(value).items() if name != _HOOK]
        return [type(value), *attributes]
    if isinstance(value, type) and _is_harmless(value.__module__):
        return []
    return gc.get_referents(value)


def _is_empty(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is cell
    except ValueError:
        return True


def _is_harmless(module: str) -> bool:
    top = module.partition(".")[0]
    return top in sys.stdlib_module_names or (top == "torch" and not _communicates(module))


def _communicates(module: str) -> bool:
    top = module.partition(".")[0]
    return top == "torch_testing_ext" or (top == "torch" and any(part in module for part in _OF_TORCH))


def _is_forbidden(value: Any) -> bool:
    """Whether a thread that reaches this value may issue a collective, or end the process."""
    if isinstance(value, _PLAIN):
        # A function that ends the process.
        return True
    if isinstance(value, types.ModuleType):
        return _communicates(value.__name__)
    owner = value if isinstance(value, (type, types.FunctionType)) else type(value)
    module = owner.__module__
    return isinstance(module, str) and _communicates(module)
