"""Finds where hung ranks are and which one differs, from their stacks and flight recorders. Pure.

Of the recorder only the *enqueuing* of a collective is trusted: gloo records its completion late, or never.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_testing_ext._collectives.records import RankRecord, body_of, list_of, read_record

from .accounts import RankEnding
from .frames import markers_of
from .report import RankReport

_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')
_PACKAGE = str(Path(__file__).parents[1])

_EQUAL_SHAPES = ("all_reduce", "allreduce", "broadcast", "all_gather", "allgather", "reduce_scatter")


@dataclass(frozen=True)
class Collective:
    """One entry of the flight recorder, equal on all ranks that issue the same collective."""

    group: str
    sequence: int
    kind: str
    shapes: str
    order: int  # in this rank, over all groups
    of_all: bool = False  # the group is the default one, in which all ranks are

    def __str__(self) -> str:
        return f"{self.kind} #{self.sequence} {self.shapes}".rstrip()


@dataclass(frozen=True)
class Difference:
    """Ranks that differ from the others in what they communicate: likely those at fault."""

    ranks: tuple[int, ...]
    sentence: str


def explain(reports: Sequence[RankReport], file: str) -> str:
    """A table with a line for each rank that was still running, and below it which rank differs."""
    running = [r for r in reports if r.ending is RankEnding.STOPPED]
    lines = []
    for r in running:
        lines.append(f"  rank {r.rank}: {where(r.stacks, file)}; {_last(collectives(r.recorder))}")
        lines += [f"    {line}" for line in _by_group(read_record(r.rank, r.recorder))]
    found = (f"=> {difference.sentence}" for difference in differences(reports))
    return "\n".join(["where the running ranks are:", *lines, *found])


def differences(reports: Sequence[RankReport]) -> list[Difference]:
    """How ranks differ whose collectives are known. A rank may be over, and the others wait for it."""
    histories = {r.rank: history for r in reports if (history := collectives(r.recorder)) is not None}
    return _between(histories, {r.rank for r in reports if r.ending is RankEnding.STOPPED})


def _last(history: list[Collective] | None) -> str:
    if history is None:
        return "its collectives are not known (it did not answer)"
    return f"last collective: {history[-1]}" if history else "no collective yet"


def _by_group(record: RankRecord | None) -> list[str]:
    """A line for each group in which the rank has communicated, unless that is the default group alone."""
    used = {**record.calls, **record.p2p} if record is not None else {}
    if record is None or all(record.groups[key].is_default for key in used):
        return []
    lines = []
    for key in used:
        group = record.groups[key]
        latest = [str(record.calls[key][-1])] if key in record.calls else []
        latest += [record.p2p[key]] if key in record.p2p else []
        lines.append(f"{group.title} ({list_of(group.members)}): {', '.join(latest)}")
    return lines


def collectives(recorder: str) -> list[Collective] | None:
    """The collectives that a rank has enqueued over all its groups, in order; None without a complete answer."""
    try:
        entries = json.loads(body_of(recorder))["entries"]
    except (ValueError, KeyError):
        return None
    found = [_collective(entry) for entry in entries if not entry.get("is_p2p")]
    return sorted(found, key=lambda collective: collective.order)


def _collective(entry: dict[str, Any]) -> Collective:
    shapes = " ".join(str(shape) for shape in entry.get("input_sizes", []))
    name, *description = entry.get("process_group", ["?"])
    return Collective(
        group=str(name),
        sequence=int(entry.get("collective_seq_id", 0)),
        kind=str(entry.get("profiling_name", "?")).rpartition(":")[2],
        shapes=shapes,
        order=int(entry.get("record_id", entry.get("id", 0))),
        of_all=description == ["default_pg"],
    )


def _between(histories: Mapping[int, Sequence[Collective]], running: Container[int]) -> list[Difference]:
    """None if all ranks issue the same collectives."""
    if len(histories) < 2:
        return []
    groups: dict[str, dict[int, dict[int, Collective]]] = {}
    for rank, history in histories.items():
        for collective in history:
            groups.setdefault(collective.group, {}).setdefault(rank, {})[collective.sequence] = collective
    for name, members in groups.items():
        of_all = any(one.of_all for history in histories.values() for one in history if one.group == name)
        # If there is only one group, it includes the running ranks that have not reached any collective.
        others = [rank for rank in histories if of_all or (len(groups) == 1 and rank in running)]
        members.update({rank: {} for rank in others if rank not in members})
    return [difference for members in groups.values() for difference in _in_group(members)]


def _in_group(members: dict[int, dict[int, Collective]]) -> list[Difference]:
    """The first collective on which the ranks disagree is the cause; without one, the ranks that lag behind are."""
    front = max(max(history, default=0) for history in members.values())
    for sequence in range(1, front + 1):
        here = {rank: history[sequence] for rank, history in members.items() if sequence in history}
        if len({_must_agree(collective) for collective in here.values()}) > 1:
            return [_disagreement(here, latest=sequence == front)]
    behind = sorted(rank for rank, history in members.items() if max(history, default=0) < front)
    there = next(history[front] for history in members.values() if front in history)
    return [Difference(tuple(behind), f"{_ranks(behind)} never reached {there}")] if behind else []


def _must_agree(collective: Collective) -> tuple[str, str]:
    """The properties that must be equal on all ranks; shapes only if the collective requires equal ones."""
    equal = any(word in collective.kind for word in _EQUAL_SHAPES)
    return collective.kind, collective.shapes if equal else ""


def _disagreement(here: dict[int, Collective], latest: bool) -> Difference:
    """Lists the smallest group of ranks first: it is likely the one at fault."""
    by_text: dict[str, list[int]] = {}
    for rank, collective in sorted(here.items()):
        by_text.setdefault(str(collective), []).append(rank)
    parts, smallest_first = [], sorted(by_text.items(), key=lambda item: len(item[1]))
    for text, ranks in smallest_first:
        verb = ("is" if latest else "was") if len(ranks) == 1 else ("are" if latest else "were")
        parts.append(f"{_ranks(ranks)} {verb} at {text}")
    return Difference(tuple(smallest_first[0][1]), ", ".join(parts))


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
    return frame is not None and frame["function"] in markers_of(frame["file"]).first_frames


def _without_callers(frames: Sequence[str], is_caller: Callable[[str], bool]) -> list[str]:
    """The frames, innermost first, without the outermost ones that only call the others."""
    number = len(frames)
    while number and (is_caller(frames[number - 1]) or not frames[number - 1].strip()):
        number -= 1
    return list(frames[:number])


def _is_harness(line: str) -> bool:
    frame = _FRAME.match(line)
    return frame is not None and markers_of(frame["file"]).harness


def _is_harness_or_unittest(line: str) -> bool:
    frame = _FRAME.match(line)
    return frame is not None and (markers_of(frame["file"]).harness or markers_of(frame["file"]).unittest)


def _is_library(file: str) -> bool:
    return file.startswith(_PACKAGE) or "/torch/" in file or "/lib/python3" in file


def _source(frame: dict[str, str]) -> str:
    try:
        text = Path(frame["file"]).read_text(errors="replace").splitlines()[int(frame["line"]) - 1].strip()
    except (OSError, IndexError):
        return ""
    return f" ({text})"


def _ranks(ranks: Sequence[int]) -> str:
    names = ", ".join(str(rank) for rank in ranks)
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
