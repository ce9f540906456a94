"""Shows where hung ranks are, from their stacks and their collectives.

The frames of the folders that run tests belong to the harness and not to a test. Markers in modules tell more:

    __unittest = True                        unittest's own marker: its frames, and those of ours that tracebacks omit
    __first_frames__ = ("_run", "_answer")   below these functions lies the stack of the process that forked this one

The frames of pytest, and of the plugin system below it, are like those of unittest. The markers are read from the
source: the process that shows a stack may not have imported the modules in it.
"""

from __future__ import annotations

import ast
import functools
import itertools
import os
import re
from collections.abc import Sequence

from torch_testing_ext._collectives.findings.finding import Finding
from torch_testing_ext._collectives.records.issued_calls import Call, RankRecord
from torch_testing_ext._process import system
from torch_testing_ext._process.code_sites import Site
from torch_testing_ext._process.words import MOST_LINES, few, list_of
from torch_testing_ext._tests.source_files import is_harness, is_library, source_text
from torch_testing_ext.launch.accounts import RankEnding
from torch_testing_ext.launch.rank_reports import RankReport

_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')
_UNITTEST = re.compile(r"^__unittest = True\b", re.MULTILINE)
# Not all modules of unittest have its marker.
_UNITTEST_FOLDER = os.path.join(os.path.dirname(os.__file__), "unittest", "")
_PYTEST_FOLDER = re.compile(r"/(?:_pytest|pluggy)/")
_FIRST = re.compile(r"^__first_frames__ = (\(.*\))", re.MULTILINE)


def explain_hang(reports: Sequence[RankReport], file: str, findings: Sequence[Finding]) -> str:
    """A table with a line for each rank that was still running, and below it what the collectives of all ranks show."""
    has_line_each = len(reports) <= MOST_LINES
    alike: dict[tuple[str, int], list[int]] = {}
    for report in reports:
        if report.ending is RankEnding.STOPPED:
            lines = [f"{site_in_words(report.stacks, file)}; {_last(report.recorder)}", *_by_group(report.recorder)]
            key = "\n    ".join(lines), report.rank if has_line_each else -1
            alike.setdefault(key, []).append(report.rank)
    rows = few([f"  {list_of(ranks)}: {text}" for (text, _), ranks in alike.items()])
    conclusions = [f"=> {finding.sentence}" for finding in findings]
    return "\n".join(["where the running ranks are:", *rows, *conclusions])


def _last(record: RankRecord | None) -> str:
    if record is None:
        return "its collectives are not known (it did not answer)"
    if record.latest is None:
        return "no collective yet"
    return f"last collective: {call_in_words(record, record.latest)}"


def call_in_words(record: RankRecord, call: Call) -> str:
    """A call with its number, unless earlier ones were dropped: then it is unknown."""
    return str(call) if record.is_whole else " ".join([call.kind, *call.shapes])


def _by_group(record: RankRecord | None) -> list[str]:
    """A line for each group in which the rank has communicated, unless that is the default group alone."""
    if record is None:
        return []
    used = {**record.calls, **record.p2p}
    if all(record.groups[key].is_default for key in used):
        return []
    latest = {key: call_in_words(record, calls[-1]) for key, calls in record.calls.items()}
    both = ((record.groups[key], filter(None, (latest.get(key), record.p2p.get(key)))) for key in used)
    return [f"{group.title} ({list_of(group.members)}): {', '.join(calls)}" for group, calls in both]


def site_of_rank(stacks: str, file: str) -> Site | None:
    """The line that a rank is at: the main thread's innermost frame in the test's file, or else outside libraries."""
    frames = main_thread(stacks)
    if not frames:
        return None
    in_file = [frame for frame in frames if frame["file"] == file]
    outside_of_libraries = [frame for frame in frames if not is_library(frame["file"])]
    chosen = (in_file or outside_of_libraries or frames)[0]
    return Site(chosen["file"], int(chosen["line"]), chosen["function"])


def site_in_words(stacks: str, file: str) -> str:
    """That line in words, with its source."""
    site = site_of_rank(stacks, file)
    return "place unknown" if site is None else f"{site}{_source(site)}"


def main_thread(stacks: str) -> list[dict[str, str]]:
    """The frames of the main thread, innermost first. faulthandler lists threads newest first, so it comes last."""
    threads = re.split(r"^(?:Current thread|Thread) .*$", stacks, flags=re.MULTILINE)
    return [match.groupdict() for line in threads[-1].splitlines() if (match := _FRAME.match(line))]


def frames_of(stacks: str) -> object:
    """The frames of all threads, to recognise stacks that are alike: the numbers of the threads do not count."""
    return tuple(tuple(match.groups()) for line in stacks.splitlines() if (match := _FRAME.match(line)))


def without_harness(stacks: str) -> str:
    """A stack dump without the harness.

    Removes the stack of the process that forked this one, which lies below its first frame; the frames from there to
    the test, also those of unittest; the thread that answers for the flight recorder; and what acts before an abort.
    """
    kept = []
    for thread in re.split(r"\n(?=(?:Current thread|Thread) )", stacks):
        title, *frames = itertools.takewhile(lambda line: "first" not in _marks(line), thread.splitlines() or [""])
        while frames and f'"{system.__file__}"' in frames[0]:
            del frames[0]
        own = _without_callers(frames, {"harness"})
        # unittest calls every test; but if it is all there is, then it is what hangs.
        if own := _without_callers(own, {"harness", "unittest"}) or own:
            kept.append("\n".join([title, *own]))
    return "\n\n".join(kept)


def _without_callers(frames: Sequence[str], marks: set[str]) -> list[str]:
    """The frames, innermost first, without the outermost ones that only call the others: they have these marks."""
    number = len(frames)
    while number and (_marks(frames[number - 1]) & marks or not frames[number - 1].strip()):
        number -= 1
    return list(frames[:number])


def _marks(line: str) -> set[str]:
    """Tell what the markers say of the function in a line of a stack: "harness", "unittest", "first"."""
    frame = _FRAME.match(line)
    if frame is None:
        return set()
    of_module, first_frames = _markers_of(frame["file"])
    return of_module | {"first"} if frame["function"] in first_frames else of_module


def _source(site: Site) -> str:
    lines = source_text(site.file).splitlines()
    return f" ({lines[site.line - 1].strip()})" if site.line <= len(lines) else ""


@functools.cache
def _markers_of(file: str) -> tuple[set[str], set[str]]:
    """The marks of all functions in a source file, and its first frames; none if it cannot be read."""
    source = source_text(file)
    first = _FIRST.search(source)
    is_unittest = file.startswith(_UNITTEST_FOLDER) or _UNITTEST.search(source) or _PYTEST_FOLDER.search(file)
    marks = set()
    if is_harness(file):
        marks.add("harness")
    if is_unittest:
        marks.add("unittest")
    return marks, set(ast.literal_eval(first[1]) if first else ())
