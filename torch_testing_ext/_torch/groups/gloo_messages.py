"""Sends and receives, which gloo's recorder leaves out."""

import functools
import pickle
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from torch_testing_ext._torch import replacing
from torch_testing_ext._torch.signs.recorded_entries import THROUGH_GLOO
from torch_testing_ext._torch.torch_frames import program_places

from .collective_errors import errors
from .made_groups import noted_groups, numbers_of_groups, timeout_of_group

# Taken before a test could replace it.
_now = time.time_ns
# The backends whose calls gloo records. That of fake accelerators is one: torch 2.15 would record them once more.
RECORDED_BY_GLOO = ("gloo", THROUGH_GLOO)
_MOST_MESSAGES = 40_000
# The methods of a group, with the kind of message and the names of their arguments: 2.11 to 2.15.
METHODS_OF_MESSAGES = {
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
        number = numbers_of_groups.get(group)
        if number is None or self._are_too_many or not _is_through_gloo(group, number, tensors):
            return None
        if len(self._noted) >= _MOST_MESSAGES:
            self._noted, self._are_too_many = [], True
            return None
        (tensor,) = tensors
        place, thread = next(program_places(sys._getframe(2)), None), threading.get_ident()
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
        timeouts = {number: timeout_of_group(group) for group, number in list(numbers_of_groups.items())}
        entries = [_entry_of(number, message, timeouts) for number, message in enumerate(self._noted)]
        return [(0, pickle.dumps({"entries": entries, "messages": not self._are_too_many}))]


messages_of_process = _Messages()


def _work_of(message: _Message) -> Any:
    return None if message.work is None else message.work()


def _entry_of(number: int, message: _Message, timeouts: dict[int, float | None]) -> dict[str, Any]:
    """A message as the recorder would have it, with its peer and tag."""
    group = noted_groups[message.group]
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


through_gloo: dict[tuple[int, str], bool] = {}  # by group and kind of device


def _is_through_gloo(group: Any, number: int, tensors: Sequence[Any]) -> bool:
    """Whether gloo sends or receives this, so that a wait for it blocks its thread. `_get_backend`: 2.11 to 2.15."""
    if len(tensors) != 1:
        return False
    device = tensors[0].device
    known = through_gloo.get((number, device.type))
    if known is None:
        with suppress(Exception):  # a group of a custom class may lack it
            known = str(group._get_backend(device).name()).lower() in RECORDED_BY_GLOO
        through_gloo[number, device.type] = known = bool(known)
    return known


@functools.cache
def watch_messages() -> None:
    """Note the sends and receives of groups, and errors of the barrier whose function does not log them."""
    replacing.replace_for_good("messages", _noted_method)


def _noted_method(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    if name == "monitored_barrier":
        return _noted_barrier(method)
    return _noted_message(method, *METHODS_OF_MESSAGES[name])


def _noted_barrier(barrier: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(barrier)
    def monitored_barrier(*args: Any, **kwargs: Any) -> Any:
        try:
            return barrier(*args, **kwargs)
        except Exception:
            errors.note()
            raise

    return _not_compiled(monitored_barrier)


def _noted_message(method: Callable[..., Any], kind: str, parameters: tuple[str, ...]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(parameters, args, strict=False)) | kwargs
        if not given.keys() >= set(parameters):
            return method(group, *args, **kwargs)
        peer = given[parameters[1]] if len(parameters) == 3 else None
        message = messages_of_process.note(kind, group, given["tensors"], peer, given["tag"])
        if message is None:
            return method(group, *args, **kwargs)
        try:
            work = method(group, *args, **kwargs)
        except BaseException as error:
            # With a peer that has left, the message lacks its partner, and uses up no number.
            if errors.has_lost_peer(error):
                message.is_issued = False
                errors.note()
            else:
                messages_of_process.drop(message)
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
    return None if work is None else messages_of_process.number_of(work)


def latest_message_of(thread: int) -> int | None:
    """The number of the latest send or receive of a thread, if its work is still in use."""
    return messages_of_process.latest_of(thread)
