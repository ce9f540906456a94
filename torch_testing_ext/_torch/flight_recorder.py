"""The flight recorder, and the log of the process groups that this process has made."""

import functools
import importlib
import inspect
import itertools
import logging
import math
import os
import pickle
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, NamedTuple

import torch

_DECORATORS = (f"{os.sep}typing_extensions.py", f"{os.sep}contextlib.py")
TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep

# Taken before a test could replace it.
_now = time.time_ns

# The function that gloo's recorder is read with: 2.11 to 2.15. From 2.15 on, it also reads those of other backends, by
# their names; before, only gloo and the backends that have a function of their own record.
_GLOO = "_dump_fr_trace"
# Those functions: `_dump_nccl_trace` if torch is built with NCCL, 2.11 to 2.15; `_dump_xccl_trace`.
_OF_A_BACKEND = re.compile(r"_dump_(?!fr_)\w+_trace")
# The backends whose calls gloo records. That of fake accelerators is one: torch 2.15 would record them once more.
RECORDED_BY_GLOO = ("gloo", "fakeccl")


@dataclass
class FlightRecorder:
    """One of torch's flight recorders; each backend may have its own. `first`: the first entry that counts.

    `backend`: whose entries the function returns; None for a function that has only its own.
    """

    function: str
    backend: str | None = None
    first: int = 0

    def dump(self, stacks: bool) -> bytes:
        """The latest 2,000 entries, pickled; b"" without a recorder."""
        function = getattr(getattr(torch._C, "_distributed_c10d", None), self.function, None)
        if function is None:
            return b""
        which = {} if self.backend is None else {"backend": self.backend}
        with _without_inductor() if stacks else nullcontext():
            try:
                data: bytes = function(True, stacks, False, **which)  # collectives, stacks, only active ones
            except RuntimeError:  # the name of a source file is not UTF-8
                data = function(True, False, False, **which)
        return data


class _InductorStandIn:
    """Stands for torch._inductor, which has no code to be looked up while its code cache is not imported.

    Only one thread sees that: another that needs inductor meanwhile gets the real one.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if name == "codecache" and threading.get_ident() == self._thread:
            return _NoCode
        return getattr(importlib.import_module("torch._inductor"), name)


class _NoCode:
    @staticmethod
    def stack_frames_for_code(path: str, line: int) -> None:
        return None


_NoCode.PyCodeCache = _NoCode  # type: ignore[attr-defined]


@contextmanager
def _without_inductor() -> Iterator[None]:
    """Keep torch from importing all of inductor, which takes seconds, only to look up frames of code that it made.

    torch looks up `torch._inductor.codecache.PyCodeCache.stack_frames_for_code` for each frame: 2.11 to 2.15.
    """
    if "torch._inductor.codecache" in sys.modules:
        yield
        return
    names, stand_in = vars(torch), _InductorStandIn()
    before = names.get("_inductor")
    names["_inductor"] = stand_in
    try:
        yield
    finally:
        if names.get("_inductor") is stand_in:
            if before is None:
                del names["_inductor"]
            else:
                names["_inductor"] = before


@dataclass(frozen=True)
class MadeGroup:
    """A process group that this process has made. `index`: its own place among the `members`.

    `world` tells groups of different worlds with the same names apart, by the store that they have met at. `made_at`:
    in nanoseconds since 1970, as the recorder has them. `backend`: as torch has it, such as "cpu:gloo,cuda:nccl".
    `is_reconfigured`: a group of this name got other members, as this one.
    """

    name: str
    description: str
    members: tuple[int, ...]
    index: int
    world: str
    made_at: int
    backend: str = ""
    timeout: float = math.inf
    is_reconfigured: bool = False

    @property
    def fields(self) -> tuple[str, str, tuple[int, ...], int, str, bool, int]:
        """The part of it that a rank leaves."""
        return self.name, self.description, self.members, self.index, self.world, self.is_reconfigured, self.made_at


_recorders = [FlightRecorder(_GLOO)]  # those of the backends in use
_groups: list[MadeGroup] = []
_in_creation: list[MadeGroup] = []
_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # by group: its place in `_groups`
_latest: dict[str, int] = {}  # by the name of a group: the sequence number of its latest collective that was seen
_used_up: dict[str, int] = {}  # and how many numbers its messages had used up then


class ErrorOfCall(NamedTuple):
    """An error of a call of torch.distributed. `places`: the lines outside of torch that it came from, innermost first.

    `at`: in nanoseconds since 1970. `function`: "" if it has raised in a wait. `lost_peer`: another rank had ended.
    """

    at: int
    function: str
    lost_peer: bool
    places: tuple[tuple[str, int, str], ...]


_errors: list[ErrorOfCall] = []
_MOST_ERRORS = 1000
_MOST_PLACES = 8
_on_error: Callable[[], None] | None = None
_is_of_lost_peer: Callable[[BaseException], bool] | None = None


def has_flight_recorder() -> bool:
    """Does this torch record the collectives of gloo? `TORCH_FR_BUFFER_SIZE=0` turns that off: 2.11 to 2.15."""
    sizes = [os.environ.get(name) for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")]
    size = next((size for size in sizes if size), "")
    return size.strip() != "0" and hasattr(getattr(torch._C, "_distributed_c10d", None), _GLOO)


def made_groups() -> list[MadeGroup]:
    """The process groups that this process has made, in order."""
    return list(_groups)


def count_of_groups() -> int:
    """The number of groups that this process has made so far."""
    return len(_groups)


def timeout_of_store(owners: Iterable[Any] | None, timeout: float | None = None) -> float | None:
    """The seconds after which a wait at a store ends; None if this process does not wait at one.

    `timeout`: of this wait, if it has one of its own. `owners`: the objects of which it may call a method that stores
    have; the default store is always one. None if it does not call any. `_get_default_store`, `Store.timeout`: 2.11 to
    2.15.
    """
    if not _in_creation and owners is None:
        return None
    import torch.distributed as dist

    if not dist.is_initialized():
        return None
    c10d: Any = dist.distributed_c10d
    # `isinstance` reads an attribute of an owner that is no store, and deprecated names of torch warn about that.
    given = [owner for owner in owners or () if issubclass(type(owner), c10d.Store)]
    stores = [c10d._get_default_store(), *given]
    ends = [float(store.timeout.total_seconds()) if timeout is None else timeout for store in stores]
    return min([*ends, *(creation.timeout for creation in _in_creation)])


# SEND, RECV, RECVANYSOURCE and COALESCED of `OpType` in C++, which has no names in Python: 2.11 to 2.15.
_OF_MESSAGES = (12, 13, 14, 17)


def is_of_collective(work: Any) -> bool:
    """Is this the work of a collective? Not that of a message, nor of a backend in Python, and no other object.

    `_get_op_type`: 2.11 to 2.15.
    """
    import torch.distributed as dist

    c10d: Any = dist.distributed_c10d
    return type(work) is c10d.Work and int(work._get_op_type()) not in _OF_MESSAGES


def group_in_creation() -> MadeGroup | None:
    """The process group that this process is making."""
    return _in_creation[-1] if _in_creation else None


def number_of_group(group: Any) -> int | None:
    """The place of a process group in `made_groups`."""
    return _numbers.get(group)


def on_error_of_collectives(call: Callable[[], None] | None) -> None:
    """Call this whenever a function of torch.distributed raises in this process."""
    global _on_error
    _on_error = call


def errors_of_collectives() -> list[ErrorOfCall]:
    """The errors of functions of torch.distributed that this process has seen."""
    return list(_errors)


def forget_errors() -> None:
    """The errors until now do not count for the next test."""
    _errors.clear()


def recorded_collectives(recorders: Sequence[FlightRecorder] = _recorders) -> list[tuple[int, bytes]]:
    """The collectives of this process, for each recorder: the number of the first entry that counts, and a pickle.

    That is a dictionary with `entries`, if there are any. Earlier entries may be among them, and a recorder keeps only
    the latest 2,000. The messages come last.
    """
    dumps = [(recorder.first, recorder.dump(stacks=True)) for recorder in recorders]
    return [*dumps, *_messages.dump()]


def take_collectives() -> list[tuple[int, bytes]]:
    """Like `recorded_collectives`, but without earlier entries; none of these will count again."""
    taken = [
        (recorder.first, pickle.dumps({"entries": _count_from_now(recorder, stacks=True)})) for recorder in _recorders
    ]
    taken += _messages.dump()
    _forget_messages()
    return taken


def forget_collectives() -> None:
    """Count only the collectives that are issued from now on: a test begins."""
    for recorder in _recorders:
        _count_from_now(recorder, stacks=False)
    _forget_messages()


def _forget_messages() -> None:
    """Messages use up sequence numbers, and collectives do not count those: remember how many that were."""
    if _messages.count():
        with suppress(RuntimeError):  # a backend may have none
            _used_up.update({name: number - before for name, (number, before, _) in sequence_numbers().items()})
    _messages.forget()


def _count_from_now(recorder: FlightRecorder, stacks: bool) -> list[dict[str, Any]]:
    """The entries that counted until now, of which none will count again."""
    data = recorder.dump(stacks)
    entries = pickle.loads(data).get("entries", []) if data else []  # missing if there are none
    counting: list[dict[str, Any]] = [entry for entry in entries if entry["record_id"] >= recorder.first]
    for entry in counting:
        name = str(entry["process_group"][0])
        _latest[name] = max(_latest.get(name, 0), entry["collective_seq_id"])
        recorder.first = max(recorder.first, entry["record_id"] + 1)
    return counting


def use_recorders(backends: set[str], recorders: list[FlightRecorder] = _recorders) -> None:
    """Read the recorders of these backends, too, from now on."""
    module = getattr(torch._C, "_distributed_c10d", None)
    wanted = [FlightRecorder(name) for name in dir(module) if _OF_A_BACKEND.fullmatch(name)] if backends else []
    if "backend" in (getattr(getattr(module, _GLOO, None), "__doc__", None) or ""):
        wanted += [FlightRecorder(_GLOO, name) for name in sorted(backends)]
    known = {(recorder.function, recorder.backend) for recorder in recorders}
    recorders.extend(new for new in wanted if (new.function, new.backend) not in known)


def _backends_of(group: Any, setting: str) -> set[str]:
    """The backends of a group, without those that gloo records for: by the names that were asked for, and by their own.

    What is made for "nccl" has the name "nccl2" from torch 2.15 on. `_device_types`, `_get_backend`: 2.11 to 2.15.
    """
    names = {part.rpartition(":")[2].lower() for part in setting.split(",") if part}
    with suppress(Exception):  # a group of a custom class may lack them
        names |= {str(group._get_backend(device).name()).lower() for device in group._device_types}
    return names - {*RECORDED_BY_GLOO, "undefined", ""}


def forget_groups() -> None:
    """Forget all groups, and collectives, that this process has made so far: they are not those of its ranks."""
    forget_collectives()
    _groups.clear()
    _numbers.clear()
    _through_gloo.clear()
    _latest.clear()
    _used_up.clear()
    forget_errors()


def is_of_torch(file: str) -> bool:
    """Is this the name of one of torch's source files, or of code that was not read from a file?

    So is that of its decorator for deprecated functions, such as `all_gather_into_tensor`, and of context managers.
    """
    return file.startswith((TORCH_FOLDER, "<")) or file.endswith(_DECORATORS)


def sequence_numbers() -> dict[str, tuple[int, int, int]]:
    """For each group, by name: its sequence number now, and of what no longer counts that of the latest collective.

    gloo does not record sends and receives, but they use up numbers: last, how many, of those that no longer count.
    Raises RuntimeError if a group has none.
    """
    import torch.distributed as dist

    groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
    names = [(str(group.group_name), group) for group in groups]
    return {name: (_sequence_number(group), _latest.get(name, 0), _used_up.get(name, 0)) for name, group in names}


def _sequence_number(group: Any) -> int:
    """A group asks only the backends that it knows: `_get_sequence_number_for_group` of both, 2.11 to 2.15."""
    with suppress(RuntimeError):
        return int(group._get_sequence_number_for_group())
    backends = {group._get_backend(device) for device in group._device_types}
    if len(backends) != 1:
        raise RuntimeError("a group of several backends, which count each for itself")
    return int(backends.pop()._get_sequence_number_for_group())


def watch_process_groups(
    creating: Callable[[str], AbstractContextManager[object]], is_of_lost_peer: Callable[[BaseException], bool]
) -> None:
    """From now on, create each process group within `creating(name)`, and note it; note messages and errors, too.

    `is_of_lost_peer`: does an error say that another rank has ended?

    `_new_process_group_helper` and `_c10d_logger`: all versions. Tests may have imported the public functions by name,
    so this one is wrapped, which torch looks up in its module.
    """
    import torch.distributed as dist
    from torch.distributed import c10d_logger

    c10d: Any = dist.distributed_c10d
    create = c10d._new_process_group_helper
    signature = inspect.signature(create)

    # Whoever wraps it once more reads its parameters.
    @functools.wraps(create)
    def create_watched(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        began = _now()
        nan_check = _nan_check(str(arguments.get("backend", "")))
        with creating(str(arguments["group_name"])), nan_check, _noted_as_in_creation(arguments, began):
            made = create(*args, **kwargs)
        if made[0] is not c10d.GroupMember.NON_GROUP_MEMBER:
            _numbers[made[0]] = len(_groups)
            backend = str(c10d._world.pg_map.get(made[0], ("",))[0])
            _groups.append(_described(arguments, backend, began))
            use_recorders(_backends_of(made[0], backend))
        return made

    c10d._new_process_group_helper = create_watched
    _watch_reconfigure(c10d.ProcessGroup)
    _watch_messages(c10d.ProcessGroup)
    global _is_of_lost_peer
    _is_of_lost_peer = is_of_lost_peer
    c10d_logger._c10d_logger.addHandler(_ErrorHandler())


def _watch_reconfigure(kind: Any) -> None:
    """Note the new members of a group that is reconfigured. `ProcessGroup.reconfigure`: 2.15."""
    reconfigure = getattr(kind, "reconfigure", None)
    if reconfigure is None:
        return

    @functools.wraps(reconfigure)
    def reconfigure_watched(group: Any, options: Any) -> Any:
        work = reconfigure(group, options)
        number = _numbers.get(group)
        if number is not None:
            # Of one that is still on its way, this process knows only itself.
            is_over = work.is_completed()
            size, index = (group.size(), group.rank()) if is_over else (1, 0)
            known = replace(_groups[number], members=tuple(range(size)), index=index, made_at=_now())
            _numbers[group] = len(_groups)
            _groups.append(replace(known, world=str(options.uuid), is_reconfigured=True))
        return work

    kind.reconfigure = reconfigure_watched


# --------------------------------------------------------------------------------------------------------------------
# Sends and receives, which gloo's recorder leaves out.

_MOST_MESSAGES = 40_000
# The methods of a group, with the kind of message and the names of their arguments: 2.11 to 2.15.
_METHODS_OF_MESSAGES = {
    "send": ("send", ("tensors", "dstRank", "tag")),
    "recv": ("recv", ("tensors", "srcRank", "tag")),
    "recv_anysource": ("recv", ("tensors", "tag")),
}


@dataclass(eq=False)
class _Message:
    """A send or receive. `group`: its place in `made_groups`; `peer`: None for any."""

    kind: str
    group: int
    peer: int | None
    tag: int
    shape: torch.Size
    dtype: torch.dtype
    place: tuple[str, int, str] | None
    thread: int
    at: int
    is_issued: bool = True
    work: weakref.ref[Any] | None = None


class _Messages:
    """The sends and receives of this process over gloo, in their order; after too many of them, none."""

    def __init__(self) -> None:
        self._noted: list[_Message] = []
        self._are_too_many = False

    def forget(self) -> None:
        self._noted = []
        self._are_too_many = False

    def count(self) -> int:
        return len(self._noted) + self._are_too_many

    def note(self, kind: str, group: Any, tensors: Sequence[Any], peer: int | None, tag: int) -> _Message | None:
        """Note a message that is about to be issued, so that no peer has got what is not noted."""
        number = _numbers.get(group)
        if number is None or self._are_too_many or not _is_through_gloo(group, number, tensors):
            return None
        if len(self._noted) >= _MOST_MESSAGES:
            self._noted, self._are_too_many = [], True
            return None
        (tensor,) = tensors
        place, thread = next(_places(sys._getframe(2)), None), threading.get_ident()
        message = _Message(kind, number, peer, tag, tensor.shape, tensor.dtype, place, thread, _now())
        self._noted.append(message)
        return message

    def drop(self, message: _Message) -> None:
        """It has raised instead of being issued."""
        self._noted.remove(message)

    def number_of(self, work: Any) -> int | None:
        """The number of the message with this work."""
        return next((number for number, each in enumerate(self._noted) if _work_of(each) is work), None)

    def latest_of(self, thread: int) -> int | None:
        """The number of the latest message of a thread, if somebody has its work."""
        numbers = [number for number, message in enumerate(self._noted) if message.thread == thread]
        return numbers[-1] if numbers and _work_of(self._noted[numbers[-1]]) is not None else None

    def dump(self) -> list[tuple[int, bytes]]:
        """Like the dump of a recorder, if there were any. `messages`: are these all?"""
        if not self.count():
            return []
        timeouts = {number: timeout_of_group(group) for group, number in list(_numbers.items())}
        entries = [_entry_of(number, message, timeouts) for number, message in enumerate(self._noted)]
        return [(0, pickle.dumps({"entries": entries, "messages": not self._are_too_many}))]


_messages = _Messages()


def _work_of(message: _Message) -> Any:
    return None if message.work is None else message.work()


def _entry_of(number: int, message: _Message, timeouts: dict[int, float | None]) -> dict[str, Any]:
    """A message as the recorder would have it, with its peer and tag."""
    group = _groups[message.group]
    timeout = timeouts.get(message.group) or group.timeout
    name, line, function = message.place or ("", 0, "")
    return {
        "record_id": number,
        "message": number,
        "is_issued": message.is_issued,
        "pg_id": message.group,
        "process_group": (group.name, group.description),
        "profiling_name": f"gloo:{message.kind}",
        "time_created_ns": message.at,
        "timeout_ms": timeout * 1000,
        "input_sizes": [tuple(message.shape)],
        "input_dtypes": [str(message.dtype).removeprefix("torch.")],
        "is_p2p": True,
        "peer": message.peer,
        "tag": message.tag,
        "frames": [{"filename": name, "line": line, "name": function}] if message.place else [],
    }


def timeout_of_group(group: Any) -> float | None:
    """The time-out of a group's operations in seconds, the shortest of its backends; None if unknown.

    `ProcessGroup._get_backend`, `ProcessGroup._device_types`, `Backend.options`: 2.11 to 2.15.
    """
    found = []
    for device in getattr(group, "_device_types", ()):
        with suppress(RuntimeError, AttributeError):
            found.append(float(group._get_backend(device).options._timeout.total_seconds()))
    return min(found, default=None)


_through_gloo: dict[tuple[int, str], bool] = {}  # by group and kind of device


def _is_through_gloo(group: Any, number: int, tensors: Sequence[Any]) -> bool:
    """Does gloo send or receive this, so that a wait for it blocks its thread? `_get_backend`: 2.11 to 2.15."""
    if len(tensors) != 1:
        return False
    device = tensors[0].device
    known = _through_gloo.get((number, device.type))
    if known is None:
        with suppress(Exception):  # a group of a custom class may lack it
            known = str(group._get_backend(device).name()).lower() in RECORDED_BY_GLOO
        _through_gloo[number, device.type] = known = bool(known)
    return known


@functools.cache
def _watch_messages(kind: Any) -> None:
    """Note the sends and receives of groups, and errors of the barrier whose function does not log them."""
    for name, (direction, parameters) in _METHODS_OF_MESSAGES.items():
        setattr(kind, name, _noted_method(getattr(kind, name), direction, parameters))
    barrier = kind.monitored_barrier

    @functools.wraps(barrier)
    def monitored_barrier(*args: Any, **kwargs: Any) -> Any:
        try:
            return barrier(*args, **kwargs)
        except Exception:
            note_error(sys._getframe(1), "monitored_barrier")
            raise

    kind.monitored_barrier = _not_compiled(monitored_barrier)


def _noted_method(method: Callable[..., Any], kind: str, parameters: tuple[str, ...]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(parameters, args, strict=False)) | kwargs
        if not given.keys() >= set(parameters):
            return method(group, *args, **kwargs)
        peer = given[parameters[1]] if len(parameters) == 3 else None
        message = _messages.note(kind, group, given["tensors"], peer, given["tag"])
        if message is None:
            return method(group, *args, **kwargs)
        try:
            work = method(group, *args, **kwargs)
        except BaseException as error:
            # With a peer that has left, the message lacks its partner, and uses up no number.
            if _has_lost_peer(error):
                message.is_issued = False
                note_error(sys._getframe(1), kind)
            else:
                _messages.drop(message)
            raise
        message.work = weakref.ref(work)
        return work

    return _not_compiled(call)


def _not_compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    """Have torch's compiler leave this function alone, and all that it calls, as the C++ that it stands for.

    `_torchdynamo_disable`, `set_code_exec_strategy`: 2.11 to 2.15.
    """
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    compiler: Any = torch._C._dynamo.eval_frame
    skip = compiler._FrameAction.SKIP
    compiler.set_code_exec_strategy(call.__code__, compiler._FrameExecStrategy(skip, skip))
    return call


def message_of_work(work: Any) -> int | None:
    """The number of the send or receive with this work, among those of the dump."""
    return None if work is None else _messages.number_of(work)


def latest_message_of(thread: int) -> int | None:
    """The number of the latest send or receive of a thread, if its work is still in use."""
    return _messages.latest_of(thread)


def logger_of_errors() -> logging.Logger:
    """The logger by which torch logs each error of a collective, which it also raises: all versions."""
    from torch.distributed import c10d_logger

    return c10d_logger._c10d_logger


@contextmanager
def _nan_check(backend: str) -> Iterator[None]:
    """While a group of NCCL is made: let `TORCH_NCCL_NAN_CHECK` count for its new backend, too, which has another name.

    `TORCH_DIST_NAN_CHECK`: 2.15. Other backends leave NaN to the sanitizer, which knows the line.
    """
    name = "TORCH_DIST_NAN_CHECK"
    if os.environ.get("TORCH_NCCL_NAN_CHECK") != "1" or name in os.environ or "nccl" not in backend.lower():
        yield
        return
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name, None)


@contextmanager
def _noted_as_in_creation(arguments: dict[str, Any], began: int) -> Iterator[None]:
    """A rank that is no member has no number there, and does not wait for the others."""
    group = _described(arguments, "", began) if arguments.get("group_rank") is not None else None
    if group is not None:
        _in_creation.append(group)
    try:
        yield
    finally:
        if group is not None:
            _in_creation.remove(group)


def _described(arguments: dict[str, Any], backend: str, began: int) -> MadeGroup:
    members = tuple(arguments["global_ranks_in_group"])
    description = arguments.get("group_desc") or ("" if members else "default_pg")
    members = members or tuple(range(arguments["group_size"]))
    name, index, world = str(arguments["group_name"]), int(arguments["group_rank"]), _world_of(arguments["store"])
    timeout = arguments.get("timeout")
    ends = math.inf if timeout is None else float(timeout.total_seconds())
    return MadeGroup(name, str(description), members, index, world, began, backend, ends)


def _world_of(store: Any) -> str:
    """The part of their store that ranks of one world know alike. `_underlying_non_prefix_store`: 2.11 to 2.15."""
    from torch._C import _distributed_c10d as stores

    if isinstance(store, stores.PrefixStore):
        store = store._underlying_non_prefix_store  # type: ignore[attr-defined]
    if isinstance(store, stores.FileStore):
        return os.path.realpath(str(store.path))  # type: ignore[attr-defined]
    return str(store.port) if isinstance(store, stores.TCPStore) else type(store).__name__


class _ErrorHandler(logging.Handler):
    """Notes when a collective has raised: torch logs that with the `error`."""

    def emit(self, record: logging.LogRecord) -> None:
        if not isinstance(record.msg, dict) or "error" not in record.msg:
            return
        note_error(sys._getframe(1), str(record.msg.get("func_name", "")))
        if _on_error is not None:
            _on_error()


def note_error(frame: FrameType | None, function: str = "") -> None:
    """A call of torch.distributed has raised the error that is being handled, with this stack."""
    if len(_errors) < _MOST_ERRORS:
        places = tuple(itertools.islice(_places(frame), _MOST_PLACES))
        _errors.append(ErrorOfCall(_now(), function, _has_lost_peer(sys.exc_info()[1]), places))


def _has_lost_peer(error: BaseException | None) -> bool:
    return error is not None and _is_of_lost_peer is not None and _is_of_lost_peer(error)


def _places(frame: FrameType | None) -> Iterator[tuple[str, int, str]]:
    """The lines of a stack outside of torch and of the logging module, innermost first."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not is_of_torch(file) and file != logging.__file__:
            yield file, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back
