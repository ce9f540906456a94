"""The flight recorder, and the log of the process groups that this process has made."""

from __future__ import annotations

import importlib
import inspect
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep

# What is kept of an entry besides its group and the line of its call.
_KEPT = (
    *("record_id", "process_group", "collective_seq_id", "profiling_name", "retired", "timeout_ms", "is_p2p"),
    *("input_sizes", "input_dtypes", "output_sizes", "output_dtypes"),
)


@dataclass
class FlightRecorder:
    """One of torch's flight recorders; each backend may have its own. `first`: the first entry that counts."""

    function: str
    first: int = 0

    def dump(self, stacks: bool) -> list[dict[str, Any]]:
        function = getattr(getattr(torch._C, "_distributed_c10d", None), self.function, None)
        if function is None:
            return []
        with _without_inductor() if stacks else nullcontext():
            data = function(True, stacks, False)  # collectives, stacks, only active ones
        trace: dict[str, Any] = pickle.loads(data)
        entries: list[dict[str, Any]] = trace.get("entries", [])  # missing if there are none
        return entries


class _InductorStandIn:
    """Stands for torch._inductor, which has no code to be looked up while its code cache is not imported.

    Only one thread sees that: another that needs inductor meanwhile gets the real one.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if threading.get_ident() == self._thread:
            return _NoCode if name == "codecache" else getattr(_NoCode, name)
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
    """A process group that this process has made. `index`: its own place among the `members`."""

    name: str
    description: str
    members: tuple[int, ...]
    index: int


# `_dump_fr_trace` is gloo's: 2.11 to 2.15. `_dump_nccl_trace` is there if torch is built with NCCL.
_recorders = [FlightRecorder("_dump_fr_trace"), FlightRecorder("_dump_nccl_trace")]
_groups: list[MadeGroup] = []
# For the backend and the name of a group: its number in `_groups` by the id that the recorder has for it, if known.
_numbers: dict[tuple[str, str], dict[int, int | None]] = {}
_latest: dict[str, int] = {}  # by the name of a group: the sequence number of its latest collective that was seen
_before_groups: dict[str, int] = {}  # by recorder: the first entry after the warm-up


def has_flight_recorder() -> bool:
    """Does this torch record the collectives of gloo? `TORCH_FR_BUFFER_SIZE=0` turns that off: 2.11 to 2.15."""
    sizes = [os.environ.get(name) for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")]
    size = next((size for size in sizes if size), "")
    return size.strip() != "0" and hasattr(getattr(torch._C, "_distributed_c10d", None), "_dump_fr_trace")


def made_groups() -> list[MadeGroup]:
    """The process groups that this process has made, in order."""
    return list(_groups)


def recorded_collectives() -> tuple[list[dict[str, Any]], bool]:
    """The collectives of this process that count, and whether none is missing: a recorder keeps the latest 2,000.

    An entry has the number of its `group` among `made_groups`, None if that is not known, and the `site` of its call:
    file, line and function.
    """
    found, is_whole = [], True
    for recorder in _used_recorders():
        entries = recorder.dump(stacks=True)
        _match_groups(recorder, entries)
        _latest.update({_key(entry)[1]: entry["collective_seq_id"] for entry in _of_groups(recorder, entries)})
        found += [_compact(entry) for entry in entries if entry["record_id"] >= recorder.first]
        is_whole = is_whole and min((entry["record_id"] for entry in entries), default=0) <= recorder.first
    return found, is_whole


def _used_recorders() -> list[FlightRecorder]:
    return [one for one in _recorders if one.function == "_dump_fr_trace" or _uses_nccl()]


def _uses_nccl() -> bool:
    """`_world.pg_map`: all versions."""
    import torch.distributed as dist

    backends = dist.distributed_c10d._world.pg_map.values() if dist.is_available() else ()
    return any("nccl" in str(backend) for backend, _ in backends)


def _compact(entry: dict[str, Any]) -> dict[str, Any]:
    kept = {name: entry[name] for name in _KEPT if name in entry}
    kept["group"] = _numbers.get(_key(entry), {}).get(entry["pg_id"])
    kept["site"] = None
    for frame in entry.get("frames", ()):
        if not is_of_torch(frame["filename"]):
            kept["site"] = (frame["filename"], frame["line"], frame["name"])
            break
    return kept


def is_of_torch(file: str) -> bool:
    """Is this the name of one of torch's source files, or of code that was not read from a file?"""
    return file.startswith((_TORCH, "<"))


def _key(entry: dict[str, Any]) -> tuple[str, str]:
    return str(entry["profiling_name"]).rpartition(":")[0], str(entry["process_group"][0])


def _match_groups(recorder: FlightRecorder, entries: list[dict[str, Any]]) -> None:
    """Match the recorder's ids to the groups: of groups with one name, later ones have higher ids.

    There is no match where a group of that name may have issued nothing.
    """
    seen: dict[tuple[str, str], set[int]] = {}
    for entry in _of_groups(recorder, entries):
        seen.setdefault(_key(entry), set()).add(entry["pg_id"])
    for key, ids in seen.items():
        known = _numbers.setdefault(key, {})
        made = [number for number, group in enumerate(_groups) if group.name == key[1]]
        in_order = sorted(ids | known.keys())
        for at, each in enumerate(in_order):
            if known.get(each) is None:
                known[each] = made[at] if len(made) == len(in_order) else None


def _of_groups(recorder: FlightRecorder, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries since the warm-up."""
    return [entry for entry in entries if entry["record_id"] >= _before_groups.get(recorder.function, 0)]


def forget_collectives() -> None:
    """Count only the collectives that are issued from now on: a test begins."""
    for recorder in _used_recorders():
        entries = recorder.dump(stacks=False)
        _match_groups(recorder, entries)
        recorder.first = max([recorder.first, *(entry["record_id"] + 1 for entry in entries)])


def forget_groups() -> None:
    """Forget all groups, and collectives, that this process has made so far: they belong to a warm-up."""
    forget_collectives()
    _before_groups.update({recorder.function: recorder.first for recorder in _recorders})
    _groups.clear()
    _numbers.clear()
    _latest.clear()


def may_have_sent_or_received() -> bool:
    """May this process have issued point-to-point operations after its last collective that `recorded_collectives` saw?

    gloo does not record these, but they use up sequence numbers. `_get_sequence_number_for_group`: 2.11 to 2.15.
    """
    import torch.distributed as dist

    groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
    return any(group._get_sequence_number_for_group() != _latest.get(str(group.group_name), 0) for group in groups)


def watch_process_groups(
    creating: Callable[[str], AbstractContextManager[None]], before_end: Callable[[], None]
) -> None:
    """From now on, create each process group within `creating(name)`, and call `before_end()` before all are destroyed.

    The groups are logged, too. `_new_process_group_helper` and `_update_default_pg`: all versions. Tests may have
    imported the public functions by name, so these two are replaced, which torch looks up in its module.
    """
    import torch.distributed as dist

    c10d: Any = dist.distributed_c10d
    create, update = c10d._new_process_group_helper, c10d._update_default_pg
    signature = inspect.signature(create)

    def create_watched(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        with creating(str(arguments["group_name"])):
            made = create(*args, **kwargs)
        if made[0] is not c10d.GroupMember.NON_GROUP_MEMBER:
            _groups.append(_made_group(arguments))
        return made

    def update_watched(group: Any) -> None:
        if group is None:
            before_end()
        update(group)

    c10d._new_process_group_helper, c10d._update_default_pg = create_watched, update_watched


def _made_group(arguments: dict[str, Any]) -> MadeGroup:
    members = tuple(arguments["global_ranks_in_group"])
    description = arguments.get("group_desc") or ("" if members else "default_pg")
    members = members or tuple(range(arguments["group_size"]))
    return MadeGroup(str(arguments["group_name"]), str(description), members, int(arguments["group_rank"]))
