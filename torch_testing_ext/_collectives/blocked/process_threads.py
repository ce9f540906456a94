"""The state of the threads of this process, which a rank reports when it is probed."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch_testing_ext._torch import torch_frames
from torch_testing_ext._torch.groups import gloo_messages, made_groups
from torch_testing_ext._torch.groups.keys_of_stores import missing_keys

from .event_loops import is_woken_by_threads_alone
from .method_calls import keys_in_words, method_call_of, timeout_of_wait
from .rank_state import PythonThread, RankState, ThreadState
from .reachable_threads import can_reach, variables_by_name, variables_of

_Seen = TypeVar("_Seen")
_METHODS_OF_STORES = ("get", "multi_get", "wait")
_ISSUING_MESSAGES = ("isend", "irecv")
# The deepest stack that is compared between two probes.
_MOST_FRAMES = 30
# A file store sleeps 10 ms between two looks.
_MOST_LOOKS, _BETWEEN_LOOKS = 20, 0.002


def state_of_process() -> RankState | None:
    """The state of the threads of this process, without the one that asks; None if the system does not show it."""
    stack, calling = _main_stack()
    try:
        threads = _other_threads()
    except OSError:
        return None
    call = None if calling is None else method_call_of(*calling)
    owners = timeout = None
    keys: tuple[str, ...] = ()
    main = threading.main_thread().ident or 0
    in_collective = gloo_messages.is_in_barrier(main)
    message: int | None = None
    if calling is not None and call is not None:
        if call.name == "wait" and call.arguments == 2:
            timeout = _in_main_frame(*calling, timeout_of_wait)
        if call.name in _METHODS_OF_STORES and (call.arguments == 1 or timeout is not None):
            owners = _in_main_frame(*calling, _owners)
            store = _in_main_frame(*calling, partial(_named_in, path=call.owner))
            among = partial(missing_keys, store)
            keys = _in_main_frame(*calling, partial(keys_in_words, method=call.name, among=among)) or ()
        elif call.name == "wait" and not call.arguments:
            work = _in_main_frame(*calling, partial(_named_in, path=call.owner))
            in_collective = bool(made_groups.is_of_collective(work))
            message = gloo_messages.message_of_work(work)
            if call.result_of in _ISSUING_MESSAGES:
                message = gloo_messages.latest_message_of(main)
    at_store = made_groups.timeout_of_store(owners, timeout)
    if at_store is not None:
        threads = _with_main_at_rest(threads)
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
        for_work=message is not None or _waits_for_work(main),
        at_store=at_store,
        keys=keys,
        in_collective=in_collective,
        message=message,
        in_loop=calling is not None and bool(_in_main_frame(*calling, is_woken_by_threads_alone)),
    )


def _other_threads() -> tuple[ThreadState, ...]:
    """The threads of this process, without the one that asks. Raises OSError if the system does not show them."""
    own = threading.get_native_id()
    numbers = (int(name) for name in os.listdir("/proc/self/task"))
    return tuple(_thread_state(number) for number in numbers if number != own)


def _with_main_at_rest(threads: tuple[ThreadState, ...]) -> tuple[ThreadState, ...]:
    """These threads, the main one as it rests: one that waits at a file looks at that again and again."""
    main = os.getpid()
    resting = next(thread for thread in threads if thread.number == main)
    for _ in range(_MOST_LOOKS):
        if resting.state == "S":
            break
        time.sleep(_BETWEEN_LOOKS)
        resting = _thread_state(main)
    return tuple(resting if thread.number == main else thread for thread in threads)


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
    frames = sys._current_frames()
    for number in (threading.main_thread().ident, threading.get_ident()):
        frames.pop(number or 0, None)
    known = {thread.ident: thread for thread in threading.enumerate()}
    others = []
    for number, frame in frames.items():
        call = method_call_of(frame.f_code, frame.f_lasti)
        is_in_torch = torch_frames.is_of_torch(frame.f_code.co_filename)
        in_torch = is_in_torch or (call is not None and call.name == "wait") or _waits_for_work(number)
        # A thread of a library has only its own frames.
        shown = next(torch_frames.program_frames(frame), frame)
        place = f"{os.path.basename(shown.f_code.co_filename)}:{shown.f_lineno}"
        thread = known.get(number)
        name = thread.name if thread else number
        native_id = (thread and thread.native_id) or 0
        in_loop = is_woken_by_threads_alone(frame)
        others.append(PythonThread(native_id, f"thread {name} ({place})", can_reach(frame), in_torch, in_loop))
    return tuple(others)


def _waits_for_work(thread: int) -> bool:
    """Whether the thread is known to wait for a work, which it is only where the hook is installed, or a barrier."""
    if gloo_messages.is_in_barrier(thread):
        return True
    hook = sys.modules.get("torch_testing_ext._torch.operations.watched_waits")
    return hook is not None and bool(hook.is_waiting_for_work(thread))


def _has_children() -> bool:
    """Whether this process has started others, which may send it a signal. True where the system does not say."""
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
