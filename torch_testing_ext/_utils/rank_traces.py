"""Traces of torch's profiler, drawn for Perfetto: each rank is a process with rows of computation and communication."""

import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch.profiler import profile, record_function, supported_activities

# Begins the name of an event that has a number of bytes and a title.
MARK = "spmd|"
_ON_HOST = ("cpu_op", "user_annotation")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
_COLLECTIVES = ("allreduce", "allgather", "reducescatter", "broadcast")

_NOTHING = nullcontext()
_is_drawing = False

Event = dict[str, Any]


def mark(title: str, nbytes: int) -> AbstractContextManager[Any]:
    """Name a part of the work and its data, for a picture that may be recorded."""
    return record_function(f"{MARK}{nbytes}|{title}") if _is_drawing else _NOTHING


@contextmanager
def picture(rank: int, gather: Callable[[Any], list[Any]], path: str | os.PathLike[str]) -> Iterator[None]:
    """Record the work in this context, which all ranks enter, and let rank 0 write their picture to `path`.

    `gather` returns the objects of all ranks.
    """
    global _is_drawing
    with profile(activities=supported_activities()) as profiler:  # type: ignore[no-untyped-call]
        _is_drawing = True
        try:
            yield
        finally:
            _is_drawing = False
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        of_ranks = gather(events_of(rank, json.loads(file.read_text())))
    if rank == 0:
        events = list(itertools.chain.from_iterable(of_ranks))
        Path(path).write_text(json.dumps({"traceEvents": events}))


def events_of(rank: int, trace: Mapping[str, Any]) -> list[Event]:
    """One rank's events as those of a process, whose threads are rows of computation or communication."""
    spans = [_read(event) for event in trace["traceEvents"] if event.get("ph") == "X"]
    spans.sort(key=lambda event: event["ts"])
    transfers = [event for event in spans if _is_transfer(event)]
    kinds = _ON_DEVICE if any(event["cat"] == "kernel" for event in spans) else _ON_HOST
    busy = {event["tid"] for event in transfers}
    drawn = []
    for event in spans:
        if event["cat"] in kinds and event["tid"] not in busy:
            drawn.append(("computation", event))
    for event in _named(transfers, spans):
        drawn.append(("communication", event))
    titles = {event["tid"]: title for title, event in drawn}
    rows = {tid: row for row, tid in enumerate(titles)}
    result: list[Event] = [_name_event(rank, "process_name", f"rank {rank}")]
    for tid, title in titles.items():
        result.append({**_name_event(rank, "thread_name", title), "tid": rows[tid]})
    zero = trace.get("baseTimeNanoseconds", 0) / 1000
    for title, event in drawn:
        place = {"ph": "X", "pid": rank, "tid": rows[event["tid"]], "cat": title}
        result.append({**place, **_times(event, zero)})
    return result


def _name_event(rank: int, kind: str, name: str) -> Event:
    """An event that names a process or one of its rows."""
    return {"ph": "M", "pid": rank, "name": kind, "args": {"name": name}}


def _is_transfer(event: Event) -> bool:
    """Is this a collective of gloo, or a kernel of NCCL?"""
    name: str = event["name"]
    of_nccl: bool = event["cat"] == "kernel" and "nccl" in name
    return of_nccl or name.startswith("gloo:")


def _read(event: Event) -> Event:
    """Turn the name of a mark into a title and arguments."""
    if not event["name"].startswith(MARK):
        return event
    _, nbytes, title = event["name"].split("|", 2)
    return {**event, "name": title, "args": {"bytes": int(nbytes)}}


def _times(event: Event, zero: float) -> Event:
    return {
        "name": event["name"],
        "ts": event["ts"] + zero,
        "dur": event["dur"],
        "args": event.get("args", {}),
    }


def _named(transfers: Sequence[Event], spans: Sequence[Event]) -> Iterator[Event]:
    """Name transfers by the marks in which they were started. Those of one kind begin in the order of their starts."""
    marks = [event for event in spans if "bytes" in event.get("args", ()) and event["cat"] == "user_annotation"]
    for kind in _COLLECTIVES:
        calls = [event for event in spans if event["name"].startswith("c10d::")]
        starts = [event["ts"] for event in calls if kind in _plain_name(event)]
        same = [event for event in transfers if kind in _plain_name(event).lower()]
        for start, event in zip(starts, same, strict=False):
            around = [mark for mark in marks if mark["ts"] <= start < mark["ts"] + mark["dur"]]
            if around:
                mark = around[-1]
                event = {**event, "name": mark["name"].removeprefix("start "), "args": mark["args"]}
            yield event


def _plain_name(event: Event) -> str:
    name: str = event["name"]
    return name.replace("_", "")
