"""The method that a frame calls now, from its instructions; and the keys that it asks a store for, from its source."""

from __future__ import annotations

import ast
import dis
import itertools
import operator
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple, TypeGuard

from torch_testing_ext._tests.source_files import source_tree

from .reachable_threads import variables_by_name

_LOADS_OF_NAMES = ("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME")
_LOADS_OF_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_CALLS = ("CALL", "CALL_KW", "CALL_METHOD", "CALL_FUNCTION_KW")
_CALLS_WITH_NAMES = ("CALL_KW", "CALL_FUNCTION_KW")
# The most values of a comprehension that are worked out.
_MOST_VALUES = 64
# How the first of two ways ends, one of which is taken.
_GOES_ON_ELSEWHERE = "JUMP_FORWARD"
_JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs})
_OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class MethodCall(NamedTuple):
    """A call of a method. `owner`: the variable that has the method, and attributes of it; () if that is not known.

    `result_of`: the function that was called for the owner; "" if that is not known.
    """

    name: str
    arguments: int
    owner: tuple[str, ...] = ()
    result_of: str = ""


def method_call_of(code: types.CodeType, last: int) -> MethodCall | None:
    """The method that a frame calls at its last instruction; None if it calls none, or it is not certain which."""
    before = list(itertools.takewhile(lambda instruction: instruction.offset <= last, dis.get_instructions(code)))
    return _method_call_at(before, _LOADS_OF_ATTRIBUTES)


def _method_call_at(before: list[dis.Instruction], loads: Sequence[str]) -> MethodCall | None:
    """The method, or function, that the last of these instructions calls; the instructions are used up."""
    if not before or before[-1].opname not in _CALLS:
        return None
    call = before.pop()
    # In 3.11 it belongs to the call, and has a part of its effect.
    if before and before[-1].opname == "PRECALL":
        before.pop()
    arguments = call.arg or 0
    _drop_arguments(before, arguments + (call.opname in _CALLS_WITH_NAMES))
    if not before or before[-1].opname not in loads:
        return None
    path = [str(before.pop().argval)]
    if before and before[-1].opname in _CALLS:
        function = _method_call_at(before, (*_LOADS_OF_ATTRIBUTES, *_LOADS_OF_NAMES))
        return MethodCall(path[0], arguments, result_of="" if function is None else function.name)
    while before and before[-1].opname in (*_LOADS_OF_ATTRIBUTES, *_LOADS_OF_NAMES):
        instruction = before.pop()
        path.append(str(instruction.argval))
        if instruction.opname in _LOADS_OF_NAMES:
            return MethodCall(path[0], arguments, tuple(path[:0:-1]))
    return MethodCall(path[0], arguments)


def _drop_arguments(before: list[dis.Instruction], values: int) -> None:
    """Drop the instructions of the arguments that a call takes as `values`; all, if one of several functions is called.

    They keep the stack above the function.
    """
    levels, targets = _levels(before)
    callee = (levels[-1] if levels else 0) - values
    place = len(before)
    while place and levels[place - 1] >= callee:
        place -= 1
    # The instruction here puts the function on the stack, or its owner, of which an attribute may be taken then.
    place += 1
    while place < len(before) and levels[place] == callee and before[place].opname in _LOADS_OF_ATTRIBUTES:
        place += 1
    ends_with_one = any(
        each.opname == _GOES_ON_ELSEWHERE and level == callee
        for each, level in zip(before[place:], levels[place:], strict=True)
    )
    end = place
    while place and before[place - 1].opname == "PUSH_NULL":
        place -= 1
    several_meet = any(each.offset in targets for each in before[place : end + 1])
    del before[0 if ends_with_one or several_meet else place :]


def _levels(instructions: Iterable[dis.Instruction]) -> tuple[list[int], dict[int, int]]:
    """The level of the stack after each instruction, and at each target of a jump: there it is the same by each way."""
    level, levels = 0, []
    at_targets: dict[int, int] = {}
    for instruction in instructions:
        level = at_targets.get(instruction.offset, level)
        code, argument = instruction.opcode, instruction.arg
        if code in _JUMPS:
            at_targets[instruction.argval] = level + dis.stack_effect(code, argument, jump=True)
        level += dis.stack_effect(code, argument, jump=False)
        levels.append(level)
    return levels, at_targets


def keys_in_words(
    frame: types.FrameType, method: str, among: Callable[[Sequence[Any]], Sequence[Any]]
) -> tuple[str, ...]:
    """The keys that a frame asks a store for: their values if variables give these, or else expressions.

    `among` chooses from the values of several.
    """
    arguments, variables = _arguments_at(frame, method)
    if not arguments:
        return ()
    with suppress(LookupError):
        known = _value_of(arguments[0], variables)
        return tuple(map(repr, among(known))) if isinstance(known, (list, tuple)) else (repr(known),)
    keys = arguments[0].elts if isinstance(arguments[0], (ast.List, ast.Tuple)) else arguments[:1]
    return tuple(_value_in_words(key, variables) for key in keys)


def timeout_of_wait(frame: types.FrameType) -> float | None:
    """The seconds that a frame gives to a `wait` of a store with its keys; None if they are not known."""
    arguments, variables = _arguments_at(frame, "wait")
    try:
        value = _value_of(arguments[1], variables) if len(arguments) == 2 else None
    except LookupError:
        return None
    return value.total_seconds() if isinstance(value, timedelta) else None


def _arguments_at(frame: types.FrameType, method: str) -> tuple[list[ast.expr], dict[str, Any]]:
    """The arguments with which a frame calls a method, and its variables; none if several calls are on the line."""
    tree = source_tree(frame.f_code.co_filename)
    calls = [] if tree is None else [node for node in ast.walk(tree) if _is_call_at(node, frame.f_lineno, method)]
    if len(calls) != 1:
        return [], {}
    arguments = [*calls[0].args, *(keyword.value for keyword in calls[0].keywords)]
    return arguments, {**frame.f_globals, **dict(variables_by_name(frame))}


def _is_call_at(node: ast.AST, line: int, method: str) -> TypeGuard[ast.Call]:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != method:
        return False
    is_there = node.lineno <= line <= (node.end_lineno or node.lineno)
    return is_there and bool(node.args or node.keywords)


def _value_in_words(expression: ast.expr, variables: Mapping[str, Any]) -> str:
    try:
        return repr(_value_of(expression, variables))
    except LookupError:
        return ast.unparse(expression)


def _value_of(expression: ast.expr, variables: Mapping[str, Any]) -> Any:
    """The value of an expression of texts and numbers, which runs no code of the program. Raises LookupError."""
    match expression:
        case ast.Constant(value):
            return value
        case ast.Name(name) if isinstance(variables.get(name), (str, int, bytes, list, tuple, timedelta)):
            return variables[name]
        case ast.List(elements) | ast.Tuple(elements):
            return [_value_of(element, variables) for element in elements]
        case ast.ListComp(element, [ast.comprehension(ast.Name(name), values, [], 0)]):
            known = _value_of(values, variables)
            if isinstance(known, (list, tuple, range)) and len(known) <= _MOST_VALUES:
                return [_value_of(element, {**variables, name: value}) for value in known]
        case ast.Call(ast.Name("range"), [*bounds], []):
            values_of_bounds = [_value_of(bound, variables) for bound in bounds]
            if all(isinstance(bound, int) for bound in values_of_bounds):
                with suppress(TypeError, ValueError):
                    return range(*values_of_bounds)
        case ast.Call(ast.Name("timedelta") | ast.Attribute(attr="timedelta"), [], keywords):
            with suppress(TypeError):
                return timedelta(**{str(keyword.arg): _value_of(keyword.value, variables) for keyword in keywords})
        case ast.Attribute(ast.Name(name), attribute):
            value = getattr(variables.get(name), "__dict__", {}).get(attribute)
            if isinstance(value, (str, int, bytes)):
                return value
        case ast.JoinedStr(parts):
            return "".join(str(_value_of(part, variables)) for part in parts)
        case ast.FormattedValue(value, -1, None):
            return _value_of(value, variables)
        case ast.IfExp(test, one, other):
            return _value_of(one if _value_of(test, variables) else other, variables)
        case ast.BinOp(left, combine, right) | ast.Compare(left, [combine], [right]) if type(combine) in _OPERATORS:
            operands = _value_of(left, variables), _value_of(right, variables)
            if {type(operand) for operand in operands} in ({int}, {str}):
                with suppress(TypeError):
                    return _OPERATORS[type(combine)](*operands)
    raise LookupError(ast.unparse(expression))
