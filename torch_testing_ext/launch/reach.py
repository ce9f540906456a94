"""Whether a thread can reach torch.distributed from its stack: one that cannot never issues a collective.

The search follows variables, closures, attributes and the names that functions use. Functions of the standard library
and of torch count as harmless by themselves. What is too large to search counts as one that can.
"""

import gc
import inspect
import sys
import threading
import types
from collections.abc import Iterator, Mapping
from typing import Any

_MOST_OBJECTS = 20_000
# The parts of torch's modules that may issue a collective, and the functions that end the process.
_OF_TORCH = ("distributed", "parallel")
_ENDING = ("_exit", "abort", "kill", "pthread_kill", "raise_signal")
_HOOK = "_invoke_excepthook"  # of a thread: it may be ours
_PLAIN = (str, bytes, int, float, complex, type(None), types.BuiltinFunctionType)


def can_reach(frame: types.FrameType | None) -> bool:
    """Can the thread with this innermost frame reach torch.distributed?"""
    left: list[Any] = []
    while frame is not None:
        left += variables_of(frame)
        if not _is_harmless(str(frame.f_globals.get("__name__", ""))):
            left += _named(frame.f_code, frame.f_globals)
        frame = frame.f_back
    seen: set[int] = set()
    while left:
        one = left.pop()
        is_plain = isinstance(one, _PLAIN) and getattr(one, "__name__", "") not in _ENDING
        if is_plain or id(one) in seen:
            continue
        if len(seen) >= _MOST_OBJECTS or _is_forbidden(one):
            return True
        seen.add(id(one))
        left += _next(one)
    return False


def variables_of(frame: types.FrameType) -> list[Any]:
    """The variables of a function that runs. No copy of them is left behind, which would keep objects alive."""
    variables = frame.f_locals
    found = list(variables.values())
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        variables.clear()
    return found


def _named(code: types.CodeType, names: Mapping[str, Any]) -> Iterator[Any]:
    """Yield all that the names in a function's code lead to: globals, attributes of modules, imported modules."""
    used = set(_names(code))
    modules = []
    for name in used:
        if name in names:
            yield names[name]
        modules += [one for one in (names.get(name), sys.modules.get(name)) if isinstance(one, types.ModuleType)]
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


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _next(one: Any) -> list[Any]:
    if isinstance(one, types.ModuleType):
        return []  # its names are followed where they are used
    if isinstance(one, types.FunctionType):
        inner = [cell.cell_contents for cell in one.__closure__ or () if not _is_empty(cell)]
        harmless = _is_harmless(one.__module__ or "")
        return [*inner, *(one.__defaults__ or ()), *([] if harmless else _named(one.__code__, one.__globals__))]
    if isinstance(one, threading.Thread):
        return [type(one), *(value for name, value in vars(one).items() if name != _HOOK)]
    if isinstance(one, type) and _is_harmless(one.__module__):
        return []
    return gc.get_referents(one)


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


def _is_forbidden(one: Any) -> bool:
    if isinstance(one, _PLAIN):
        return True  # a function that ends the process
    if isinstance(one, types.ModuleType):
        return _communicates(one.__name__)
    kind = one if isinstance(one, type) else type(one)
    module = one.__module__ if isinstance(one, types.FunctionType) else kind.__module__
    return isinstance(module, str) and _communicates(module)
