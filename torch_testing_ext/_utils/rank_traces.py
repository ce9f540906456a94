"""Traces of torch's profiler, drawn for Perfetto: each rank is a process with rows of computation and communication."""

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
_ON_HOST, _ON_DEVICE = ("cpu_op", "user_annotation"), ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
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
        Path(path).write_text(json.dumps({"traceEvents": [event for events in of_ranks for event in events]}))


def events_of(rank: int, trace: Mapping[str, Any]) -> list[Event]:
    """One rank's events as those of a process, whose threads are rows of computation or communication."""
    spans = [_read(event) for event in trace["traceEvents"] if event.get("ph") == "X"]
    spans.sort(key=lambda event: event["ts"])
    transfers = [e for e in spans if e["name"].startswith("gloo:") or (e["cat"] == "kernel" and "nccl" in e["name"])]
    kinds = _ON_DEVICE if any(event["cat"] == "kernel" for event in spans) else _ON_HOST
    busy = {event["tid"] for event in transfers}
    drawn = [("computation", event) for event in spans if event["cat"] in kinds and event["tid"] not in busy]
    drawn += [("communication", event) for event in _named(transfers, spans)]
    titles = {event["tid"]: title for title, event in drawn}
    rows = {tid: row for row, tid in enumerate(titles)}
    base = {"ph": "M", "pid": rank}
    names = [{**base, "name": "process_name", "args": {"name": f"rank {rank}"}}]
    names += [
        {**base, "name": "thread_name", "tid": rows[tid], "args": {"name": title}} for tid, title in titles.items()
    ]
    zero = trace.get("baseTimeNanoseconds", 0) / 1000
    events = [{"ph": "X", "pid": rank, "tid": rows[e["tid"]], "cat": title} | _times(e, zero) for title, e in drawn]
    return names + events


def _read(event: Event) -> Event:
    """Turn the name of a mark into a title and arguments."""
    if not event["name"].startswith(MARK):
        return event
    _, nbytes, title = event["name"].split("|", 2)
    return {**event, "name": title, "args": {"bytes": int(nbytes)}}


def _times(event: Event, zero: float) -> Event:
    return {"name": event["name"], "ts": event["ts"] + zero, "dur": event["dur"], "args": event.get("args", {})}


def _named(transfers: Sequence[Event], spans: Sequence[Event]) -> Iterator[Event]:
    """Name transfers by the marks in which they were started. Those of one kind begin in the order of their starts."""
    marks = [event for event in spans if "bytes" in event.get("args", ()) and event["cat"] == "user_annotation"]
    for kind in _COLLECTIVES:
        starts = [e["ts"] for e in spans if e["name"].startswith("c10d::") and kind in e["name"].replace("_", "")]
        same = [event for event in transfers if kind in event["name"].replace("_", "").lower()]
        for start, event in zip(starts, same, strict=False):
            inside = [mark for mark in marks if mark["ts"] <= start < mark["ts"] + mark["dur"]]
            names = {"name": inside[-1]["name"].removeprefix("start "), "args": inside[-1]["args"]} if inside else {}
            yield {**event, **names}
