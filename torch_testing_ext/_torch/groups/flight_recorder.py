"""torch's flight recorders, which note the collectives of a process."""

import importlib
import os
import pickle
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pickle import dumps
from typing import Any

import torch

from . import roots_of_calls
from .gloo_messages import RECORDED_BY_GLOO, TAGS_OF_BARRIER, messages_of_process

# The function that gloo's recorder is read with: 2.11 to 2.15. From 2.15 on, it also reads those of other backends, by
# their names; before, only gloo and the backends that have a function of their own record.
_GLOO = "_dump_fr_trace"
# Those functions: `_dump_nccl_trace` if torch is built with NCCL, 2.11 to 2.15; `_dump_xccl_trace`.
_OF_A_BACKEND = re.compile(r"_dump_(?!fr_)\w+_trace")


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


_recorders = [FlightRecorder(_GLOO)]  # those of the backends in use
latest: dict[str, int] = {}  # by the name of a group: the sequence number of its latest collective that was seen
used_up: dict[str, int] = {}  # and how many numbers its messages had used up then


def has_flight_recorder() -> bool:
    """Whether this torch records the collectives of gloo. `TORCH_FR_BUFFER_SIZE=0` turns that off: 2.11 to 2.15."""
    sizes = [os.environ.get(name) for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")]
    size = next((size for size in sizes if size), "")
    return size.strip() != "0" and hasattr(getattr(torch._C, "_distributed_c10d", None), _GLOO)


def recorded_collectives(recorders: Sequence[FlightRecorder] = _recorders) -> list[tuple[int, bytes]]:
    """The collectives of this process, for each recorder: the number of the first entry that counts, and a pickle.

    That is a dictionary with `entries`, if there are any. Earlier entries may be among them, and a recorder keeps only
    the latest 2,000. The messages and the roots come last.
    """
    dumps = [(recorder.first, recorder.dump(stacks=True)) for recorder in recorders]
    return [*dumps, *messages_of_process.dump(), *roots_of_calls.dump()]


def take_collectives() -> list[tuple[int, bytes]]:
    """Like `recorded_collectives`, but without earlier entries; none of these will count again."""
    counting = [(recorder.first, _count_from_now(recorder, stacks=True)) for recorder in _recorders]
    taken = [(first, dumps({"entries": entries})) for first, entries in counting]
    taken += [*messages_of_process.dump(), *roots_of_calls.dump()]
    _forget_messages([entry for _, entries in counting for entry in entries])
    return taken


def forget_collectives() -> None:
    """Count only the collectives that are issued from now on: a test begins."""
    _forget_messages([entry for recorder in _recorders for entry in _count_from_now(recorder, stacks=False)])


def _forget_messages(entries: list[dict[str, Any]]) -> None:
    """Messages use up sequence numbers, and collectives do not count those: remember how many that were.

    `entries`: the collectives until now. Monitored barriers since the latest of them have tags that they count.
    """
    times: dict[str, int] = {}
    for entry in entries:
        name = str(entry["process_group"][0])
        times[name] = max(times.get(name, 0), entry["time_created_ns"])
    for name, at in messages_of_process.times_of_barriers():
        if at > times.get(name, 0):
            latest[name] = latest.get(name, 0) + TAGS_OF_BARRIER
    if messages_of_process.count():
        with suppress(RuntimeError):  # a backend may have none
            used_up.update({name: number - before for name, (number, before, _) in sequence_numbers().items()})
    messages_of_process.forget()
    roots_of_calls.forget()


def _count_from_now(recorder: FlightRecorder, stacks: bool) -> list[dict[str, Any]]:
    """The entries that counted until now, of which none will count again."""
    data = recorder.dump(stacks)
    entries = pickle.loads(data).get("entries", []) if data else []  # missing if there are none
    counting: list[dict[str, Any]] = [entry for entry in entries if entry["record_id"] >= recorder.first]
    for entry in counting:
        name = str(entry["process_group"][0])
        latest[name] = max(latest.get(name, 0), entry["collective_seq_id"])
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


def backends_of(group: Any, setting: str) -> set[str]:
    """The backends of a group, without those that gloo records for: by the names that were asked for, and by their own.

    What is made for "nccl" has the name "nccl2" from torch 2.15 on. `_device_types`, `_get_backend`: 2.11 to 2.15.
    """
    names = {part.rpartition(":")[2].lower() for part in setting.split(",") if part}
    with suppress(Exception):  # a group of a custom class may lack them
        names |= {str(group._get_backend(device).name()).lower() for device in group._device_types}
    return names - {*RECORDED_BY_GLOO, "undefined", ""}


def sequence_numbers() -> dict[str, tuple[int, int, int]]:
    """For each group, by name: its sequence number now, and of what no longer counts that of the latest collective.

    gloo does not record sends and receives, but they use up numbers: last, how many, of those that no longer count.
    Raises RuntimeError if a group has none.
    """
    import torch.distributed as dist

    groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
    names = [(str(group.group_name), group) for group in groups]
    return {name: (_sequence_number(group), latest.get(name, 0), used_up.get(name, 0)) for name, group in names}


def _sequence_number(group: Any) -> int:
    """A group asks only the backends that it knows: `_get_sequence_number_for_group` of both, 2.11 to 2.15."""
    with suppress(RuntimeError):
        return int(group._get_sequence_number_for_group())
    backends = {group._get_backend(device) for device in group._device_types}
    if len(backends) != 1:
        raise RuntimeError("a group of several backends, which count each for itself")
    return int(backends.pop()._get_sequence_number_for_group())
