"""The collectives of a rank: at the end of each test for its account, and in a file when the parent asks."""

import dis
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

from torch_testing_ext._collectives.blocked import PythonThread, RankState, ThreadState
from torch_testing_ext._collectives.raw import pack
from torch_testing_ext._process import messages

from . import in_flight
from .account_writer import account_of
from .context import context_here
from .job import Sanitize
from .rank_report import now
from .reach import can_reach, variables_of

_METHODS_OF_STORES = ("get", "multi_get", "wait")
# The deepest stack that is compared between two probes.
_MOST_FRAMES = 30


def begin_first_task() -> None:
    """In a persistent rank: its first test begins, in which earlier collectives do not count."""
    recorder = _recorder_with_groups()
    if recorder is not None:
        recorder.forget_collectives()


def prepare_to_sanitize(wanted: bool) -> None:
    """In a process that forks ranks: let them inherit the hook, or remove it."""
    if wanted or "torch_testing_ext._sanitizer.sanitized_rank" in sys.modules:
        from torch_testing_ext._sanitizer import sanitized_rank

        sanitized_rank.prepare(wanted)


def sanitize(rank: int, wanted: Sanitize | None, log: Path) -> None:
    """A test begins in this rank."""
    prepare_to_sanitize(bool(wanted))
    if wanted:
        from torch_testing_ext._sanitizer import sanitized_rank

        sanitized_rank.begin(rank, wanted.kinds, wanted.shake, log)


def end_of_sanitizing() -> None:
    """The test of this rank has returned. Raises what the sanitizer has failed with."""
    sanitized_rank = sys.modules.get("torch_testing_ext._sanitizer.sanitized_rank")
    if sanitized_rank is not None:
        sanitized_rank.finish()


def collectives(more_follow: bool = False) -> bytes:
    """At the end of a test: the collectives of this rank; b"" if it has made no process group."""
    recorder = _recorder_with_groups()
    is_forked_by_test = context_here() is None
    if recorder is None or is_forked_by_test:
        return b""
    dumps = recorder.take_collectives() if more_follow else recorder.recorded_collectives()
    return _packed(recorder, dumps, now())


def answer(target: Path, with_state: bool) -> None:
    """While the test runs: write the collectives that this rank has issued so far, and what its threads do."""
    from torch_testing_ext._torch import flight_recorder

    at = now()
    state = _state(flight_recorder) if with_state else None
    sanitized_rank = sys.modules.get("torch_testing_ext._sanitizer.sanitized_rank")
    if state is not None and sanitized_rank is not None and sanitized_rank.is_active():
        # The parent reads the log; the first dump of a recorder takes half a second.
        state = replace(state, timers=state.timers or sanitized_rank.has_shorter_timeouts())
        data = _packed(flight_recorder, [], at, state, {})
    else:
        # Before the dump: a later one would look like a gap.
        sequences = _sequences(flight_recorder) if with_state else None
        dumps = flight_recorder.recorded_collectives()
        data = _packed(flight_recorder, dumps, at, state, sequences)
    _put(target, data)


def answer_error(target: Path) -> None:
    """While the test runs: write an account of the exception that is in flight in the main thread, if there is one."""
    error = in_flight.of_main_thread()
    if error is not None:
        account = account_of(error, isinstance(error, AssertionError), now())
        _put(target, messages.to_json(account).encode("ascii"))


def _put(target: Path, data: bytes) -> None:
    # The parent may read at any time.
    unfinished = target.with_name(f"{target.name}.new")
    unfinished.write_bytes(data)
    os.replace(unfinished, target)


def _recorder_with_groups() -> ModuleType | None:
    """`_torch.flight_recorder`, if this process has made a process group."""
    recorder = sys.modules.get("torch_testing_ext._torch.flight_recorder")
    if recorder is None or not recorder.made_groups():
        return None
    return recorder


def _packed(
    recorder: ModuleType,
    dumps: list[tuple[int, bytes]],
    at: float,
    state: RankState | None = None,
    sequences: dict[str, tuple[int, int]] | None = None,
) -> bytes:
    groups = [group.fields for group in recorder.made_groups()]
    creating = recorder.group_in_creation()
    being_made = None if creating is None else creating.fields
    errors = recorder.errors_of_collectives()
    return pack(groups, dumps, errors, recorder.TORCH_FOLDER, at, state, sequences, being_made)


def _state(recorder: ModuleType) -> RankState | None:
    """The state of the threads of this process, without the one that asks; None if the system does not show it."""
    stack, calling = _main_stack()
    try:
        threads = _other_threads()
    except OSError:
        return None
    calls = ""
    owners = None
    if calling is not None:
        calls = _method_called(*calling)
        owners = _owners(*calling) if calls in _METHODS_OF_STORES else None
    return RankState(
        machine=os.uname().machine,
        main=os.getpid(),
        threads=threads,
        frames=stack,
        in_torch=bool(stack) and recorder.is_of_torch(stack[0][0]),
        calls=calls,
        others=_others(recorder),
        # The parent finds that.
        p2p=False,
        timers=any(signal.getitimer(signal.ITIMER_REAL)),
        children=_has_children(),
        for_work=_waits_for_work(threading.main_thread().ident or 0),
        at_store=recorder.timeout_of_store(owners),
    )


def _other_threads() -> tuple[ThreadState, ...]:
    """The threads of this process, without the one that asks. Raises OSError if the system does not show them."""
    own = threading.get_native_id()
    numbers = (int(name) for name in os.listdir("/proc/self/task"))
    return tuple(_thread(number) for number in numbers if number != own)


def _main_stack() -> tuple[tuple[tuple[str, int, str], ...], tuple[CodeType, int] | None]:
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


def _owners(code: CodeType, last: int) -> list[Any] | None:
    """The objects of which the main thread may call a method now, with one argument; None if it calls another one.

    With more arguments, a store may have another time-out than its own.
    """
    instructions = dis.get_instructions(code)
    call = next((instruction for instruction in instructions if instruction.offset == last), None)
    if call is None or call.opname not in ("CALL", "CALL_METHOD") or call.arg != 1:
        return None
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None or (frame.f_code, frame.f_lasti) != (code, last):
        return None
    owners = list(variables_of(frame))
    owners += [frame.f_globals.get(name) for name in code.co_names]
    attributes: list[Any] = []
    for owner in owners:
        attributes += getattr(owner, "__dict__", {}).values()
    return owners + attributes


def _others(recorder: ModuleType) -> tuple[PythonThread, ...]:
    """The threads that run Python, without the main one and the one that asks."""
    frames = sys._current_frames()
    for number in (threading.main_thread().ident, threading.get_ident()):
        frames.pop(number or 0, None)
    known = {thread.ident: thread for thread in threading.enumerate()}
    others = []
    for number, frame in frames.items():
        calls = _method_called(frame.f_code, frame.f_lasti)
        is_in_torch = bool(recorder.is_of_torch(frame.f_code.co_filename))
        in_torch = is_in_torch or calls == "wait" or _waits_for_work(number)
        # The frame itself if all are of the standard library.
        shown = next(_outside(frame), frame)
        place = f"{os.path.basename(shown.f_code.co_filename)}:{shown.f_lineno}"
        thread = known.get(number)
        name = thread.name if thread else number
        native_id = (thread and thread.native_id) or 0
        others.append(PythonThread(native_id, f"thread {name} ({place})", can_reach(frame), in_torch))
    return tuple(others)


def _outside(innermost: FrameType) -> Iterator[FrameType]:
    """The frames of a thread outside of the standard library, innermost first."""
    for frame, _ in traceback.walk_stack(innermost):
        package, _, _ = str(frame.f_globals.get("__name__", "")).partition(".")
        if package not in sys.stdlib_module_names:
            yield frame


def _waits_for_work(thread: int) -> bool:
    """Is the thread known to wait for a work? Only where the hook is installed."""
    hook = sys.modules.get("torch_testing_ext._torch.hook")
    return hook is not None and bool(hook.is_waiting_for_work(thread))


def _has_children() -> bool:
    """Has this process started others, which may send it a signal? True where the system does not say."""
    try:
        return any(Path(f"/proc/self/task/{name}/children").read_text() for name in os.listdir("/proc/self/task"))
    except OSError:
        return True


def _thread(number: int) -> ThreadState:
    folder = Path(f"/proc/self/task/{number}")
    # Behind the name in parentheses, which may hold anything.
    _, _, fields = (folder / "stat").read_text().rpartition(")")
    status = fields.split()[0]
    name = (folder / "comm").read_text().strip()
    call = (folder / "syscall").read_text().strip()
    ran = (folder / "schedstat").read_text().strip()
    return ThreadState(number, name, status, call, ran)


def _method_called(code: CodeType, last: int) -> str:
    """The method that a frame calls now, from its instructions; "" if it is not certain."""
    name = ""
    for instruction in dis.get_instructions(code):
        if instruction.offset > last:
            break
        if instruction.opname in ("LOAD_METHOD", "LOAD_ATTR"):
            name = str(instruction.argval)
        elif instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"):
            name = ""
    return name


def _sequences(recorder: ModuleType) -> dict[str, tuple[int, int]] | None:
    # A backend may have none.
    with suppress(Exception):
        numbers: dict[str, tuple[int, int]] = recorder.sequence_numbers()
        return numbers
    return None
