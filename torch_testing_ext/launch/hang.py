"""Shows where hung ranks are, from their stacks and their collectives.

Markers in modules tell which frames of a stack belong to the harness and not to a test:

    __rank_frame__ = True                    no frame of this module belongs to the test
    __first_frames__ = ("_run", "_answer")   below these functions lies the stack of the process that forked this one
    __unittest = True                        unittest's own marker: its frames, and those of ours that tracebacks omit

The frames of pytest, and of the plugin system below it, are like those of unittest. The markers are read from the
source: the process that shows a stack may not have imported the modules in it.
"""

from __future__ import annotations

import ast
import functools
import itertools
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_testing_ext._collectives.findings import Finding
from torch_testing_ext._collectives.records import Call, RankRecord, list_of, read_record
from torch_testing_ext._process.logs import text_of

from .accounts import RankEnding
from .rank_report import RankReport

_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')
_HARNESS = re.compile(r"^__rank_frame__ = True\b", re.MULTILINE)
_UNITTEST = re.compile(r"^__unittest = True\b", re.MULTILINE)
# Not all modules of unittest have its marker.
_UNITTEST_FOLDER = os.path.join(os.path.dirname(os.__file__), "unittest", "")
_PYTEST_FOLDER = re.compile(r"/(?:_pytest|pluggy)/")
_FIRST = re.compile(r"^__first_frames__ = (\(.*\))", re.MULTILINE)
_PACKAGE = str(Path(__file__).parents[1])


def explain(reports: Sequence[RankReport], file: str, findings: Sequence[Finding]) -> str:
    """A table with a line for each rank that was still running, and below it what the collectives of all ranks show."""
    lines = []
    for r in reports:
        if r.ending is RankEnding.STOPPED:
            record = read_record(r.rank, r.recorder)
            lines.append(f"  rank {r.rank}: {where(r.stacks, file)}; {_last(record)}")
            lines += [f"    {line}" for line in _by_group(record)]
    return "\n".join(["where the running ranks are:", *lines, *(f"=> {finding.sentence}" for finding in findings)])


def _last(record: RankRecord | None) -> str:
    if record is None:
        return "its collectives are not known (it did not answer)"
    latest = max((calls[-1] for calls in record.calls.values()), key=lambda call: call.order, default=None)
    return f"last collective: {_shown(record, latest)}" if latest is not None else "no collective yet"


def _shown(record: RankRecord, call: Call) -> str:
    """A call with its number, unless earlier ones were dropped: then it is unknown."""
    return str(call) if record.is_whole else " ".join([call.kind, *call.shapes])


def _by_group(record: RankRecord | None) -> list[str]:
    """A line for each group in which the rank has communicated, unless that is the default group alone."""
    used = {**record.calls, **record.p2p} if record is not None else {}
    if record is None or all(record.groups[key].is_default for key in used):
        return []
    lines = []
    for key in used:
        group = record.groups[key]
        latest = [_shown(record, record.calls[key][-1])] if key in record.calls else []
        latest += [record.p2p[key]] if key in record.p2p else []
        lines.append(f"{group.title} ({list_of(group.members)}): {', '.join(latest)}")
    return lines


def where(stacks: str, file: str) -> str:
    """The line that a rank is at: the main thread's innermost frame in the test's file, or else outside libraries."""
    frames = main_thread(stacks)
    if not frames:
        return "place unknown"
    chosen = next((f for f in frames if f["file"] == file), None)
    chosen = chosen or next((f for f in frames if not _is_library(f["file"])), frames[0])
    at = f"{Path(chosen['file']).name}:{chosen['line']} in {chosen['function']}"
    return f"{at}{_source(chosen)}"


def main_thread(stacks: str) -> list[dict[str, str]]:
    """The frames of the main thread, innermost first. faulthandler lists threads newest first, so it comes last."""
    threads = re.split(r"^(?:Current thread|Thread) .*$", stacks, flags=re.MULTILINE)
    return [match.groupdict() for line in threads[-1].splitlines() if (match := _FRAME.match(line))]


def tidy(stacks: str) -> str:
    """A stack dump without the harness.

    Removes the stack of the process that forked this one, which lies below its first frame; the frames from there to
    the test, also those of unittest; and the thread that answers for the flight recorder.
    """
    kept = []
    for thread in re.split(r"\n(?=(?:Current thread|Thread) )", stacks):
        title, *frames = itertools.takewhile(lambda line: not _is_first_frame(line), thread.splitlines() or [""])
        own = _without_callers(frames, _is_harness)
        # unittest calls every test; but if it is all there is, then it is what hangs.
        if own := _without_callers(own, _is_harness_or_unittest) or own:
            kept.append("\n".join([title, *own]))
    return "\n\n".join(kept)


def _is_first_frame(line: str) -> bool:
    frame = _FRAME.match(line)
    return frame is not None and frame["function"] in _markers_of(frame["file"]).first_frames


def _without_callers(frames: Sequence[str], is_caller: Callable[[str], bool]) -> list[str]:
    """The frames, innermost first, without the outermost ones that only call the others."""
    number = len(frames)
    while number and (is_caller(frames[number - 1]) or not frames[number - 1].strip()):
        number -= 1
    return list(frames[:number])


def _is_harness(line: str) -> bool:
    frame = _FRAME.match(line)
    return frame is not None and _markers_of(frame["file"]).harness


def _is_harness_or_unittest(line: str) -> bool:
    frame = _FRAME.match(line)
    return frame is not None and (_markers_of(frame["file"]).harness or _markers_of(frame["file"]).unittest)


def _is_library(file: str) -> bool:
    return file.startswith(_PACKAGE) or "/torch/" in file or "/lib/python3" in file


def _source(frame: dict[str, str]) -> str:
    lines, number = text_of(Path(frame["file"])).splitlines(), int(frame["line"])
    return f" ({lines[number - 1].strip()})" if number <= len(lines) else ""


@dataclass(frozen=True)
class _Markers:
    """The markers of one module."""

    harness: bool
    unittest: bool
    first_frames: frozenset[str]


@functools.cache
def _markers_of(file: str) -> _Markers:
    """The markers in a source file; none if it cannot be read."""
    source = text_of(Path(file))
    first = _FIRST.search(source)
    is_unittest = file.startswith(_UNITTEST_FOLDER) or bool(_UNITTEST.search(source) or _PYTEST_FOLDER.search(file))
    return _Markers(bool(_HARNESS.search(source)), is_unittest, frozenset(ast.literal_eval(first[1]) if first else ()))
