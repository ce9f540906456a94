"""Tells a rank that waits for its peers and for nothing else: by its threads, and what they can reach."""

from __future__ import annotations

import ast
import dis
import gc
import inspect
import itertools
import operator
import os
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard, TypeVar

from torch_testing_ext._process.source_files import source_tree

_Seen = TypeVar("_Seen")

# --------------------------------------------------------------------------------------------------------------------
# Threads that can reach torch.distributed from their stack. One that cannot never issues a collective.
#
# The search follows variables, closures, attributes and the names that functions use. Functions of the standard
# library and of torch count as harmless by themselves. What is too large to search counts as one that can.

_MOST_OBJECTS = 20_000
# The parts of torch's modules that may issue a collective, and the functions that end the process.
_OF_TORCH = ("distributed", "parallel")
_ENDING = ("_exit", "abort", "kill", "pthread_kill", "raise_signal")
# Of a thread: it may be ours.
_HOOK = "_invoke_excepthook"
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
    used = set(_names(code))
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


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


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
    """May a thread that reaches this value issue a collective, or end the process?"""
    if isinstance(value, _PLAIN):
        # A function that ends the process.
        return True
    if isinstance(value, types.ModuleType):
        return _communicates(value.__name__)
    owner = value if isinstance(value, (type, types.FunctionType)) else type(value)
    module = owner.__module__
    return isinstance(module, str) and _communicates(module)


# --------------------------------------------------------------------------------------------------------------------
# A rank that waits for its peers and for nothing else, known by two probes of its threads.
#
# This is point 3 of the theorem in `proof`: no thread of the rank that may issue a call can go on, unless one of its
# calls ends. A wait that another thread, a timer or another kind of peer may end is not proof: it only raises
# suspicion.

# Threads of gloo that serve connections and execute collectives, and those of a TCPStore's server. They wake up all the
# time, or wait with a time-out of the group, or for other ranks: they matter only through the collectives that gloo's
# complete.
_SERVING_THREADS = ("gloo_tcp_loop", "pt_gloo_runloop", "pt_tcpstore_uv", "pt_tcpstore")

# The loop of a connection has no name of its own in torch 2.11: it takes at most 64 events, and waits 10 ms for them.
_EPOLL_WAIT = {"x86_64": "232", "aarch64": "22"}
_OF_A_LOOP = (64, 10)

_FUTEX = {"x86_64": "202", "aarch64": "98"}
# FUTEX_WAIT, FUTEX_WAIT_BITSET.
_FUTEX_WAITS = (0, 9)
_FUTEX_COMMAND = 0x7F
# Other processes cannot end the wait.
_FUTEX_PRIVATE = 0x80


@dataclass(frozen=True)
class ThreadState:
    """A native thread as the kernel shows it. `ran`: the time that it has spent running, to compare two probes."""

    number: int
    name: str
    state: str
    syscall: str
    ran: str


@dataclass(frozen=True)
class PythonThread:
    """A thread that runs Python, besides the main one. `number`: that of its native thread, 0 if unknown.

    `can_act`: it may issue a collective, as far as can be seen; `in_torch`: it is in a call of torch, or in a `wait()`.
    """

    number: int
    text: str
    can_act: bool
    in_torch: bool


@dataclass(frozen=True)
class RankState:
    """The threads of a rank at a moment.

    `frames` are those of the main thread, innermost first, and `calls` is the method that the innermost one calls, if
    it calls one. `others` are the further threads that run Python, `p2p` says whether point-to-point operations have
    been issued, `timers` whether a signal may interrupt the main thread, and `children` whether the rank has started
    processes. `for_work`: the main thread is known to wait for a work, with no other time-out than that of its group.
    `at_store`: it waits at a store, for a key or while it makes a group, for at most so many seconds. `keys`: those
    keys in words, as far as they are known. `in_collective`: it waits for the work of a collective. `message`: the
    message whose work it waits for, by its number among the messages; the parent makes that its order among all calls.
    """

    machine: str
    main: int
    threads: tuple[ThreadState, ...]
    frames: tuple[tuple[str, int, str], ...]
    in_torch: bool
    calls: str
    others: tuple[PythonThread, ...]
    p2p: bool
    timers: bool
    children: bool = False
    for_work: bool = False
    at_store: float | None = None
    keys: tuple[str, ...] = ()
    in_collective: bool = False
    message: int | None = None

    @property
    def waits_at_store(self) -> bool:
        """Does the main thread wait at a store? Such a wait looks again and again, or reads from a connection."""
        call = next((thread.syscall for thread in self.threads if thread.number == self.main), "")
        return self.at_store is not None and call.split()[:1] != [_FUTEX.get(self.machine)]

    @property
    def waits_in_own_process(self) -> bool:
        """Does the main thread wait without end, and not in torch: for a lock, or for another thread?"""
        main = next((thread for thread in self.threads if thread.number == self.main), None)
        is_in_torch = self.in_torch or self.for_work or self.calls == "wait"
        return main is not None and not is_in_torch and _waits_without_end(main, self.machine, may_be_timed=False)


def why_not_blocked(first: RankState | None, second: RankState | None) -> str | None:
    """Say why a rank is not known to wait in torch for ever, from two probes; None if it is."""
    if first is None or second is None:
        return "it did not say what it does"
    probes = _Probes(first, second)
    reasons = (
        probes.native_thread_that_runs,
        probes.python_thread_that_may_act,
        probes.signal_that_may_come,
        probes.main_thread_that_has_moved,
        probes.wait_outside_of_torch,
        probes.message_that_is_not_recorded,
    )
    for reason in reasons:
        text = reason()
        if text is not None:
            return text
    return None


class _Probes:
    """The states of a rank at two probes. Each method is a reason for which the rank may go on, or None."""

    def __init__(self, first: RankState, second: RankState):
        self.first = first
        self.second = second
        self.earlier = {thread.number: thread for thread in first.threads}
        # The further threads that run Python and do not wait for others of this process without end.
        asleep = self._asleep()
        self.awake = [thread for thread in second.others if thread.number not in asleep]

    def _asleep(self) -> set[int]:
        """The threads that have slept without end at both probes."""
        numbers = set()
        for thread in self.second.threads:
            is_unchanged = self.earlier.get(thread.number) == thread
            if is_unchanged and _waits_without_end(thread, self.second.machine, may_be_timed=False):
                numbers.add(thread.number)
        return numbers

    def native_thread_that_runs(self) -> str | None:
        """A thread, the main one or one without Python, that does not sleep until others of this process wake it."""
        of_python = {thread.number for thread in self.second.others}
        for thread in self.second.threads:
            is_main = thread.number == self.second.main
            if thread.number in of_python or self._is_harmless(thread):
                continue
            if self.earlier.get(thread.number) != thread:
                return "one of its threads is running"
            may_be_timed = is_main and self.second.for_work
            if not _waits_without_end(thread, self.second.machine, may_be_timed):
                return f"{'it' if is_main else 'one of its threads'} waits for something else"
        return None

    def _is_harmless(self, thread: ThreadState) -> bool:
        """May a thread run, since it only serves, or looks at a store again and again?"""
        if thread.number == self.second.main:
            return self.second.waits_at_store and thread.state == "S"
        machine = self.second.machine
        return _serves(self.earlier.get(thread.number), machine) or _serves(thread, machine)

    def python_thread_that_may_act(self) -> str | None:
        """A thread that may issue a call, and is awake or may be woken by one that is."""
        could_act = {thread.number for thread in self.first.others if thread.can_act}
        for thread in self.second.others:
            may_act = thread.can_act or thread.number in could_act
            may_be_woken = bool(self.awake) and not thread.in_torch
            if may_act and (thread in self.awake or may_be_woken):
                return f"its {thread.text} may issue collectives"
        return None

    def signal_that_may_come(self) -> str | None:
        return "a signal may wake it" if self.second.timers else None

    def main_thread_that_has_moved(self) -> str | None:
        return "it has moved on" if self.first.frames != self.second.frames else None

    def wait_outside_of_torch(self) -> str | None:
        """The main thread may wait for another thread, as one that waits in torch; then nothing else may wake it."""
        second = self.second
        if second.for_work or second.in_torch or second.calls == "wait" or second.waits_at_store:
            return None
        if self.awake:
            return f"its {self.awake[0].text} may wake it"
        if second.children:
            return "a process that it has started may wake it"
        return None

    def message_that_is_not_recorded(self) -> str | None:
        """A send or receive that was not noted: its end is not known, as that of a collective is."""
        may_be_awaited = any(thread.can_act and thread.in_torch for thread in self.second.others)
        if not self.second.p2p or (self.second.in_collective and not may_be_awaited):
            return None
        return "it has sent or received, which is not recorded"


def _serves(thread: ThreadState | None, machine: str) -> bool:
    """Is this a thread that matters only through the collectives which it completes?"""
    if thread is None:
        return False
    if thread.name in _SERVING_THREADS:
        return True
    number, *arguments = thread.syscall.split() or [""]
    if number != _EPOLL_WAIT.get(machine) or len(arguments) < 4:
        return False
    most_events, milliseconds = int(arguments[2], 16), int(arguments[3], 16)
    return (most_events, milliseconds) == _OF_A_LOOP


def _waits_without_end(thread: ThreadState, machine: str, may_be_timed: bool) -> bool:
    """Is the thread asleep in a futex of this process, without a time-out unless it may have one?"""
    number, *arguments = thread.syscall.split() or [""]
    if thread.state != "S" or number != _FUTEX.get(machine) or len(arguments) < 4:
        return False
    operation = int(arguments[1], 16)
    is_wait = operation & _FUTEX_COMMAND in _FUTEX_WAITS
    is_private = bool(operation & _FUTEX_PRIVATE)
    has_timeout = int(arguments[3], 16) != 0
    return is_wait and is_private and (may_be_timed or not has_timeout)


# --------------------------------------------------------------------------------------------------------------------
# The method that a frame calls now, from its instructions, and the keys of a store that it asks for, from its source.

_LOADS_OF_NAMES = ("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME")
_LOADS_OF_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_CALLS = ("CALL", "CALL_KW", "CALL_METHOD", "CALL_FUNCTION_KW")
_CALLS_WITH_NAMES = ("CALL_KW", "CALL_FUNCTION_KW")
_NO_VALUES = ("KW_NAMES", "PUSH_NULL")
_JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs})


_OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {ast.Add: operator.add, ast.Sub: operator.sub}


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
    # The values that the call takes, back to the first instruction of its arguments.
    values = arguments + (call.opname in _CALLS_WITH_NAMES)
    while before and (values or before[-1].opname in _NO_VALUES):
        instruction = before.pop()
        if instruction.opcode in _JUMPS:
            return None
        if values:
            values -= dis.stack_effect(instruction.opcode, instruction.arg)
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


def _keys_in_words(frame: types.FrameType, method: str) -> tuple[str, ...]:
    """The keys that a frame asks a store for: their values if variables give these, or else expressions."""
    arguments, variables = _arguments_at(frame, method)
    if not arguments:
        return ()
    keys = arguments[0].elts if isinstance(arguments[0], (ast.List, ast.Tuple)) else arguments[:1]
    return tuple(_value_in_words(key, variables) for key in keys)


def _timeout_of_wait(frame: types.FrameType) -> float | None:
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
        case ast.BinOp(left, combine, right) if type(combine) in _OPERATORS:
            operands = _value_of(left, variables), _value_of(right, variables)
            if {type(operand) for operand in operands} in ({int}, {str}):
                with suppress(TypeError):
                    return _OPERATORS[type(combine)](*operands)
    raise LookupError(ast.unparse(expression))


# --------------------------------------------------------------------------------------------------------------------
# The state of the threads of this process, which a rank reports when it is probed.

_METHODS_OF_STORES = ("get", "multi_get", "wait")
_ISSUING_MESSAGES = ("isend", "irecv")
# The deepest stack that is compared between two probes.
_MOST_FRAMES = 30


def state_of_process() -> RankState | None:
    """The state of the threads of this process, without the one that asks; None if the system does not show it."""
    from torch_testing_ext._torch import torch_frames
    from torch_testing_ext._torch.groups import gloo_messages, made_groups

    stack, calling = _main_stack()
    try:
        threads = _other_threads()
    except OSError:
        return None
    call = None if calling is None else method_call_of(*calling)
    owners = timeout = None
    keys: tuple[str, ...] = ()
    in_collective = False
    message: int | None = None
    if calling is not None and call is not None:
        if call.name == "wait" and call.arguments == 2:
            timeout = _in_main_frame(*calling, _timeout_of_wait)
        if call.name in _METHODS_OF_STORES and (call.arguments == 1 or timeout is not None):
            owners = _in_main_frame(*calling, _owners)
            keys = _in_main_frame(*calling, partial(_keys_in_words, method=call.name)) or ()
        elif call.name == "wait" and not call.arguments:
            work = _in_main_frame(*calling, partial(_named_in, path=call.owner))
            in_collective = bool(made_groups.is_of_collective(work))
            message = gloo_messages.message_of_work(work)
            if call.result_of in _ISSUING_MESSAGES:
                message = gloo_messages.latest_message_of(threading.main_thread().ident or 0)
    return RankState(
        machine=os.uname().machine,
        main=os.getpid(),
        threads=threads,
        frames=stack,
        in_torch=bool(stack) and torch_frames.is_of_torch(stack[0][0]),
        calls="" if call is None else call.name,
        others=_python_threads(),
        # The parent finds that.
        p2p=False,
        timers=any(signal.getitimer(signal.ITIMER_REAL)),
        children=_has_children(),
        for_work=message is not None or _waits_for_work(threading.main_thread().ident or 0),
        at_store=made_groups.timeout_of_store(owners, timeout),
        keys=keys,
        in_collective=in_collective,
        message=message,
    )


def _other_threads() -> tuple[ThreadState, ...]:
    """The threads of this process, without the one that asks. Raises OSError if the system does not show them."""
    own = threading.get_native_id()
    numbers = (int(name) for name in os.listdir("/proc/self/task"))
    return tuple(_thread_state(number) for number in numbers if number != own)


def _main_stack() -> tuple[tuple[tuple[str, int, str], ...], tuple[types.CodeType, int] | None]:
    """The main thread's stack, and its innermost code with the instruction.

    A frame that is held here keeps the variables of its function after it has returned. The test may notice: autograd
    copies a gradient that somebody else refers to. So these are gone before another thread can run.
    """
    main = threading.main_thread().ident
    frames = sys._current_frames()
    frame = innermost = frames.get(main or 0)
    stack: list[tuple[str, int, str]] = []
    while frame is not None and len(stack) < _MOST_FRAMES:
        stack.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    calling = (innermost.f_code, innermost.f_lasti) if innermost is not None else None
    return tuple(stack), calling


def _in_main_frame(code: types.CodeType, last: int, look: Callable[[types.FrameType], _Seen]) -> _Seen | None:
    """Look at the main thread's innermost frame if it is still at this instruction; None if it is not."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None or (frame.f_code, frame.f_lasti) != (code, last):
        return None
    return look(frame)


def _owners(frame: types.FrameType) -> list[Any]:
    """The objects of which a frame may call a method now."""
    owners = list(variables_of(frame))
    owners += [frame.f_globals.get(name) for name in frame.f_code.co_names]
    attributes: list[Any] = []
    for owner in owners:
        attributes += getattr(owner, "__dict__", {}).values()
    return owners + attributes


def _named_in(frame: types.FrameType, path: Sequence[str]) -> Any:
    """The object that a variable of a frame leads to by these attributes; None if that is not known."""
    if not path:
        return None
    name, *attributes = path
    value = dict(variables_by_name(frame)).get(name, frame.f_globals.get(name))
    for attribute in attributes:
        value = getattr(value, "__dict__", {}).get(attribute)
    return value


def _python_threads() -> tuple[PythonThread, ...]:
    """The threads that run Python, without the main one and the one that asks."""
    from torch_testing_ext._torch import torch_frames

    frames = sys._current_frames()
    for number in (threading.main_thread().ident, threading.get_ident()):
        frames.pop(number or 0, None)
    known = {thread.ident: thread for thread in threading.enumerate()}
    others = []
    for number, frame in frames.items():
        call = method_call_of(frame.f_code, frame.f_lasti)
        is_in_torch = torch_frames.is_of_torch(frame.f_code.co_filename)
        in_torch = is_in_torch or (call is not None and call.name == "wait") or _waits_for_work(number)
        # The frame itself if all are of the standard library.
        shown = next(_outside(frame), frame)
        place = f"{os.path.basename(shown.f_code.co_filename)}:{shown.f_lineno}"
        thread = known.get(number)
        name = thread.name if thread else number
        native_id = (thread and thread.native_id) or 0
        others.append(PythonThread(native_id, f"thread {name} ({place})", can_reach(frame), in_torch))
    return tuple(others)


def _outside(innermost: types.FrameType) -> Iterator[types.FrameType]:
    """The frames of a thread outside of the standard library, innermost first."""
    for frame, _ in traceback.walk_stack(innermost):
        package, _, _ = str(frame.f_globals.get("__name__", "")).partition(".")
        if package not in sys.stdlib_module_names:
            yield frame


def _waits_for_work(thread: int) -> bool:
    """Is the thread known to wait for a work? Only where the hook is installed."""
    hook = sys.modules.get("torch_testing_ext._torch.operations.watched_waits")
    return hook is not None and bool(hook.is_waiting_for_work(thread))


def _has_children() -> bool:
    """Has this process started others, which may send it a signal? True where the system does not say."""
    try:
        return any(Path(f"/proc/self/task/{name}/children").read_bytes() for name in os.listdir("/proc/self/task"))
    except OSError:
        return True


def _thread_state(number: int) -> ThreadState:
    folder = Path(f"/proc/self/task/{number}")
    # Behind the name in parentheses, which may hold anything.
    _, _, fields = (folder / "stat").read_text().rpartition(")")
    status = fields.split()[0]
    name = (folder / "comm").read_text().strip()
    call = (folder / "syscall").read_text().strip()
    ran = (folder / "schedstat").read_text().strip()
    return ThreadState(number, name, status, call, ran)
