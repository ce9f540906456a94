"""The file beside the logs of the ranks from which reports draw when each rank ran, and what it issued then."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from torch_testing_ext._collectives.lanes import FILE, RankLane, calls_of
from torch_testing_ext._collectives.raw import RawRecord
from torch_testing_ext._process import messages

from .rank_report import RankReport, now


def write(directory: Path, asked: float, reports: Sequence[RankReport], left: Sequence[RawRecord | None]) -> None:
    """Write the lanes of the ranks. `left`: the records of those whose reports have none."""
    epoch, lanes = time.time() - now(), []
    for at, report in enumerate(reports):
        raw = left[at] if at < len(left) else None
        record = report.recorder or (raw.record(report.rank) if raw is not None else None)
        began = epoch + report.ended - report.seconds
        calls = tuple(call for call in calls_of(record, len(reports)) if call.at >= began)
        lanes.append(RankLane(report.rank, epoch + asked, began, epoch + report.ended, report.ending.value, calls))
    with suppress(OSError):  # a full disk is no failure of the test
        (directory / FILE).write_text(json.dumps(messages.encode(lanes)))


def read(file: Path) -> tuple[RankLane, ...]:
    """The lanes of a file; none if it is damaged."""
    try:
        found: tuple[RankLane, ...] = messages.decode(tuple[RankLane, ...], json.loads(file.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ()
    return found
