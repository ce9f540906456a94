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
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch_testing_ext._collectives.findings import Finding
from torch_testing_ext._collectives.records import Call, RankRecord, Site
from torch_testing_ext._process.logs import text_of
from torch_testing_ext._process.whole_files import is_harness, is_library, source_tree
from torch_testing_ext._process.words import MOST_LINES, few, list_of

from .accounts import RankEnding
from .rank_report import RankReport

_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')
_UNITTEST = re.compile(r"^__unittest = True\b", re.MULTILINE)
# Not all modules of unittest have its marker.
_UNITTEST_FOLDER = os.path.join(os.path.dirname(os.__file__), "unittest", "")
_PYTEST_FOLDER = re.compile(r"/(?:_pytest|pluggy)/")
_FIRST = re.compile(r"^__first_frames__ = (\(.*\))", re.MULTILINE)


def explain(reports: Sequence[RankReport], file: str, findings: Sequence[Finding]) -> str:
    """A table with a line for each rank that was still running, and below it what the collectives of all ranks show."""
    alike: dict[tuple[str, int], list[int]] = {}
    for r in reports:
        if r.ending is RankEnding.STOPPED:
            lines = [f"{where(r.stacks, file)}; {_last(r.recorder)}", *_by_group(r.recorder)]
            alike.setdefault(("\n    ".join(lines), r.rank if len(reports) <= MOST_LINES else -1), []).append(r.rank)
    found = few([f"  {list_of(ranks)}: {text}" for (text, _), ranks in alike.items()])
    return "\n".join(["where the running ranks are:", *found, *(f"=> {finding.sentence}" for finding in findings)])


def _last(record: RankRecord | None) -> str:
    if record is None:
        return "its collectives are not known (it did not answer)"
    return f"last collective: {shown(record, record.latest)}" if record.latest is not None else "no collective yet"


def shown(record: RankRecord, call: Call) -> str:
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
        latest = [shown(record, record.calls[key][-1])] if key in record.calls else []
        latest += [record.p2p[key]] if key in record.p2p else []
        lines.append(f"{group.title} ({list_of(group.members)}): {', '.join(latest)}")
    return lines


def place(stacks: str, file: str) -> Site | None:
    """The line that a rank is at: the main thread's innermost frame in the test's file, or else outside libraries."""
    frames = main_thread(stacks)
    if not frames:
        return None
    chosen = next((f for f in frames if f["file"] == file), None)
    chosen = chosen or next((f for f in frames if not is_library(f["file"])), frames[0])
    return Site(chosen["file"], int(chosen["line"]), chosen["function"])


def where(stacks: str, file: str) -> str:
    """That line in words, with its source."""
    site = place(stacks, file)
    return "place unknown" if site is None else f"{site}{_source(site)}"


def waits_with_timeout(site: Site) -> bool:
    """Does the function of this line call a `wait` with a time-out, as for an error that the test expects?"""
    here = (one for one in _around(site) if isinstance(one, ast.FunctionDef) and one.name == site.function)
    calls = (one for each in here for one in ast.walk(each) if isinstance(one, ast.Call) and (one.args or one.keywords))
    return any(isinstance(one.func, ast.Attribute) and one.func.attr == "wait" for one in calls)


def catches_errors(site: Site) -> bool:
    """Does a `try` or `suppress` catch an error of this line, and no `assertRaises` expects it?"""
    around = list(_around(site))
    managers = [ast.unparse(one.items[0]) for one in around if isinstance(one, ast.With)]
    if any("aises" in manager for manager in managers):
        return False
    tries = (one.body for one in around if isinstance(one, ast.Try) and one.handlers)
    is_tried = any(body[0].lineno <= site.line <= (body[-1].end_lineno or 0) for body in tries)
    return is_tried or any("suppress(" in manager for manager in managers)


def _around(site: Site) -> Iterator[ast.stmt]:
    """The statements that a line is in, from the outermost one."""
    tree = source_tree(site.file)
    for one in ast.walk(tree) if tree is not None else ():
        if isinstance(one, ast.stmt) and one.lineno <= site.line <= (one.end_lineno or one.lineno):
            yield one


def main_thread(stacks: str) -> list[dict[str, str]]:
    """The frames of the main thread, innermost first. faulthandler lists threads newest first, so it comes last."""
    threads = re.split(r"^(?:Current thread|Thread) .*$", stacks, flags=re.MULTILINE)
    return [match.groupdict() for line in threads[-1].splitlines() if (match := _FRAME.match(line))]


def frames_of(stacks: str) -> object:
    """The frames of all threads, to recognise stacks that are alike: the numbers of the threads do not count."""
    return tuple(tuple(match.groups()) for line in stacks.splitlines() if (match := _FRAME.match(line)))


def tidy(stacks: str) -> str:
    """A stack dump without the harness.

    Removes the stack of the process that forked this one, which lies below its first frame; the frames from there to
    the test, also those of unittest; and the thread that answers for the flight recorder.
    """
    kept = []
    for thread in re.split(r"\n(?=(?:Current thread|Thread) )", stacks):
        title, *frames = itertools.takewhile(lambda line: "first" not in _marks(line), thread.splitlines() or [""])
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
    if (frame := _FRAME.match(line)) is None:
        return set()
    of_module, first_frames = _markers_of(frame["file"])
    return {*of_module, *(["first"] if frame["function"] in first_frames else [])}


def _source(site: Site) -> str:
    lines = text_of(Path(site.file)).splitlines()
    return f" ({lines[site.line - 1].strip()})" if site.line <= len(lines) else ""


@functools.cache
def _markers_of(file: str) -> tuple[set[str], set[str]]:
    """The marks of all functions in a source file, and its first frames; none if it cannot be read."""
    source = text_of(Path(file))
    first = _FIRST.search(source)
    is_unittest = file.startswith(_UNITTEST_FOLDER) or _UNITTEST.search(source) or _PYTEST_FOLDER.search(file)
    marks = [*(["harness"] if is_harness(file) else []), *(["unittest"] if is_unittest else [])]
    return set(marks), set(ast.literal_eval(first[1]) if first else ())
