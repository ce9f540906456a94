"""The file beside the logs of the ranks from which reports draw when each rank ran, and what it issued then."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from torch_testing_ext._collectives.lanes_of_ranks import LANES_FILE, RankLane
from torch_testing_ext._collectives.records.issued_calls import calls_of
from torch_testing_ext._collectives.records.raw_records import RawRecord
from torch_testing_ext._process import messages
from torch_testing_ext.launch.accounts import now
from torch_testing_ext.launch.rank_reports import RankReport


def write_lanes(directory: Path, asked: float, reports: Sequence[RankReport], left: Sequence[RawRecord | None]) -> None:
    """Write the lanes of the ranks. `left`: the records of those whose reports have none."""
    epoch = time.time() - now()
    lanes = []
    for report, raw in zip(reports, left, strict=True):
        record = report.recorder
        if record is None and raw is not None:
            record = raw.record(report.rank)
        ended = epoch + report.ended
        began = ended - report.seconds
        issued = calls_of(record, len(reports)) if record is not None and record.calls else ()
        calls = tuple(call for call in issued if call.at >= began)
        lanes.append(RankLane(report.rank, epoch + asked, began, ended, report.ending.value, calls))
    with suppress(OSError):
        # A full disk is no failure of the test.
        (directory / LANES_FILE).write_text(json.dumps(messages.encode(lanes)))


def read_lanes(file: Path) -> tuple[RankLane, ...]:
    """The lanes of a file; none if it is damaged."""
    try:
        written = json.loads(file.read_bytes())
        lanes: tuple[RankLane, ...] = messages.decode(tuple[RankLane, ...], written)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ()
    return lanes
