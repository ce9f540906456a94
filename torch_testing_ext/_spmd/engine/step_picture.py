"""Pictures of calls: the computation and the communication of all ranks over time, in one file for Perfetto."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch.profiler import profile, record_function, supported_activities

from torch_testing_ext._utils.rank_traces import MARK, events_of

from .wire import Wire

_NOTHING = nullcontext()
_is_drawing = False


def mark(title: str, nbytes: int) -> AbstractContextManager[Any]:
    """Name a part of a call and its data, for a picture that may be recorded."""
    return record_function(f"{MARK}{nbytes}|{title}") if _is_drawing else _NOTHING


@contextmanager
def picture(wire: Wire, path: str | os.PathLike[str]) -> Iterator[None]:
    """Record the calls in this context, which all ranks enter, and let rank 0 write their picture to `path`."""
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
        of_ranks = wire.gather_objects(events_of(wire.rank, json.loads(file.read_text())))
    if wire.rank == 0:
        Path(path).write_text(json.dumps({"traceEvents": [event for events in of_ranks for event in events]}))
