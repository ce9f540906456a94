"""Sends, receives and monitored barriers, which gloo's recorder leaves out."""

import functools
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pickle import dumps
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
# A monitored barrier takes two numbers of those that collectives have: 2.11 to 2.15.
TAGS_OF_BARRIER = 2
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

    def entry(self, number: int) -> dict[str, Any]:
        return {
            "message": number,
            "is_issued": self.is_issued,
            "input_sizes": [tuple(self.shape)],
            "input_dtypes": [str(self.dtype).removeprefix("torch.")],
            "is_p2p": True,
            "peer": self.peer,
            "tag": self.tag,
        }


@dataclass(eq=False)
class _Barrier:
    """A monitored barrier. `timeout`: None for that of the group."""

    group: int
    timeout: float | None
    place: tuple[str, int, str] | None
    thread: int
    at: int
    is_over: bool = False
    has_raised: bool = False
    kind: str = "monitored_barrier"
    work: None = None

    def entry(self, number: int) -> dict[str, Any]:
        """It is made of messages: the first member receives one from each other, and answers each."""
        group = noted_groups[self.group]
        answers = len(group.members) - 1 if self.is_over and not self.has_raised else 0
        messages = len(group.members) - 1 + answers if group.index == 0 else 2
        timeout = {} if self.timeout is None else {"timeout_ms": self.timeout * 1000}
        return {
            "input_sizes": [],
            "input_dtypes": [],
            "retired": self.is_over,
            "messages": messages,
            "tags": TAGS_OF_BARRIER,
            **timeout,
        }


class _Messages:
    """The sends, receives and barriers of this process over gloo, in their order; after too many of them, none."""

    def __init__(self) -> None:
        self._noted: list[_Message | _Barrier] = []
        self._are_too_many = False

    def forget(self) -> None:
        self._noted = []
        self._are_too_many = False

    def count(self) -> int:
        return len(self._noted) + self._are_too_many

    def note(self, kind: str, group: Any, tensors: Sequence[Any], peer: int | None, tag: int) -> _Message | None:
        """Note a message that is about to be issued, so that no peer has got what is not noted."""
        number = numbers_of_groups.get(group)
        if len(tensors) != 1 or not self._is_noted(group, number, tensors[0].device.type):
            return None
        (tensor,) = tensors
        place, thread = next(program_places(sys._getframe(2)), None), threading.get_ident()
        message = _Message(kind, number or 0, peer, tag, tensor.shape, tensor.dtype, place, thread, _now())
        self._noted.append(message)
        return message

    def note_barrier(self, group: Any, timeout: Any) -> _Barrier | None:
        """Note a monitored barrier that begins."""
        number = numbers_of_groups.get(group)
        if not self._is_noted(group, number, "cpu"):
            return None
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else None
        place, thread = next(program_places(sys._getframe(2)), None), threading.get_ident()
        barrier = _Barrier(number or 0, seconds, place, thread, _now())
        self._noted.append(barrier)
        return barrier

    def _is_noted(self, group: Any, number: int | None, device: str) -> bool:
        """Whether a call is to be noted: one of a group that is known, over gloo, if there are not too many."""
        if number is None or self._are_too_many or not _is_through_gloo(group, number, device):
            return False
        if len(self._noted) >= _MOST_MESSAGES:
            self._noted, self._are_too_many = [], True
        return not self._are_too_many

    def is_in_barrier(self, thread: int) -> bool:
        """Whether a thread is in a monitored barrier now."""
        latest = next((noted for noted in reversed(self._noted) if noted.thread == thread), None)
        return isinstance(latest, _Barrier) and not latest.is_over

    def times_of_barriers(self) -> list[tuple[str, int]]:
        """For each monitored barrier: the name of its group, and when it began."""
        return [(noted_groups[noted.group].name, noted.at) for noted in self._noted if isinstance(noted, _Barrier)]

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
        """Return the messages in the form of a recorder's dump; [] if there were none."""
        if not self.count():
            return []
        timeouts = {number: timeout_of_group(group) for group, number in list(numbers_of_groups.items())}
        entries = [_entry_of(number, message, timeouts) for number, message in enumerate(self._noted)]
        return [(0, dumps({"entries": entries, "messages": not self._are_too_many}))]


messages_of_process = _Messages()


def _work_of(message: _Message | _Barrier) -> Any:
    return None if message.work is None else message.work()


def _entry_of(number: int, message: _Message | _Barrier, timeouts: dict[int, float | None]) -> dict[str, Any]:
    """A message as the recorder would have it, with its peer and tag, or a barrier."""
    group = noted_groups[message.group]
    timeout = timeouts.get(message.group) or group.timeout
    name, line, function = message.place or ("", 0, "")
    return {
        "record_id": number,
        "pg_id": message.group,
        "process_group": (group.name, group.description),
        "profiling_name": f"gloo:{message.kind}",
        "time_created_ns": message.at,
        "timeout_ms": timeout * 1000,
        "frames": [{"filename": name, "line": line, "name": function}] if message.place else [],
        **message.entry(number),
    }


through_gloo: dict[tuple[int, str], bool] = {}  # by group and kind of device


def _is_through_gloo(group: Any, number: int, device: str) -> bool:
    """Whether gloo serves this kind of device, so that a wait blocks its thread. `_get_backend`: 2.11 to 2.15."""
    known = through_gloo.get((number, device))
    if known is None:
        with suppress(Exception):  # a group of a custom class may lack it
            known = str(group._get_backend(torch.device(device)).name()).lower() in RECORDED_BY_GLOO
        through_gloo[number, device] = known = bool(known)
    return known


@functools.cache
def watch_messages() -> None:
    """Note the sends, receives and monitored barriers of groups, and errors of these barriers, which nobody logs."""
    replacing.replace_for_good("messages", _noted_method)


def _noted_method(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    if name == "monitored_barrier":
        return _noted_barrier(method)
    return _noted_message(method, *METHODS_OF_MESSAGES[name])


def _noted_barrier(barrier: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(barrier)
    def monitored_barrier(group: Any, *args: Any, **kwargs: Any) -> Any:
        noted = messages_of_process.note_barrier(group, args[0] if args else kwargs.get("timeout"))
        try:
            return barrier(group, *args, **kwargs)
        except BaseException as error:
            if noted is not None:
                noted.has_raised = True
            if isinstance(error, Exception):
                errors.note()
            raise
        finally:
            if noted is not None:
                noted.is_over = True

    return not_compiled(monitored_barrier)


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

    return not_compiled(call)


def not_compiled(call: Callable[..., Any]) -> Callable[..., Any]:
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


def is_in_barrier(thread: int) -> bool:
    """Whether a thread is in a monitored barrier now."""
    return messages_of_process.is_in_barrier(thread)
