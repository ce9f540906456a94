"""A failure in the page: a table of its ranks, the lines of the source, and a lane for each rank. Pure."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence

from torch_testing_ext._collectives.failure import Cell, CodeLine, FailureView, Value
from torch_testing_ext._collectives.lanes import CallBar, RankLane, bars, meetings
from torch_testing_ext.launch.folding import groups

from ..model import Attempt
from . import text
from .text import node
from .wait_graph import wait_graph

ROW, BAR = 20, 14  # heights, in pixels
MOST_LANES = 16
_ALIKE = 3  # lanes that are drawn of ranks that did the same, where there are too many
_LONGEST, _SHORTEST = 10.0, 2e-3  # seconds before the last call that are drawn
_BEFORE, _AFTER = 0.05, 0.4  # parts of them that are drawn besides

_KEYWORD = re.compile(
    r"(?P<comment>#.*)|(?P<string>[rbf]*(?:\"[^\"]*\"|'[^']*'))|"
    r"\b(?P<word>if|else|elif|for|while|return|raise|def|class|with|try|except|finally|import|from|in|not|and|or|as|"
    r"assert|lambda|yield|pass|None|True|False|is|del|async|await)\b"
)


def failure(attempt: Attempt) -> Iterator[ET.Element]:
    """The parts of a failure; another one as its text says it."""
    view = attempt.failure
    if view is None or view.text is not None:
        yield node("pre", text.screen(attempt), class_="message")
        return
    parts = view.parts()
    yield node("p", parts.title, class_="headline")
    if parts.table:
        yield node("table", *map(_row, parts.table), class_="ranks")
    if parts.code:
        yield node("pre", *_code(parts.code, view), class_="code")
    lines = [*parts.values, *map(Value, parts.remarks)]
    lines += [Value(line) for note in parts.notes for line in note.split("\n") if line]
    if lines:
        spans = (node("span", f"{line.text}\n", class_=line.kind.value) for line in lines)
        yield node("pre", *spans, class_="values")
    yield from wait_graph(view.waits)
    yield from lanes([one.lane for one in attempt.ranks if one.lane is not None])


def _row(cell: Cell) -> ET.Element:
    place = node("td", str(cell.site or ""), class_="place")
    return node("tr", node("th", cell.ranks, scope="row"), node("td", cell.did), place)


def _code(code: Sequence[CodeLine], view: FailureView) -> Iterator[ET.Element]:
    """The lines, each with its number: that of the culprit, and that of the others, have a colour."""
    culprit = view.rows[0].site if view.rows else None
    for line in code:
        is_culprit = line.is_at_fault and (culprit is None or culprit.line == line.number)
        kind = "culprit" if is_culprit else "other" if line.is_at_fault else None
        yield node("span", node("i", f"{line.number:>5}  "), *_tokens(line.text), "\n", class_=kind)


def _tokens(line: str) -> Iterator[ET.Element | str]:
    at = 0
    for found in _KEYWORD.finditer(line):
        yield line[at : found.start()]
        yield node("b", found[0], class_=found.lastgroup)
        at = found.end()
    yield line[at:]


def lanes(found: Sequence[RankLane]) -> Iterator[ET.Element]:
    """A lane for each rank, with its calls, and an arrow from the first to come to the last one."""
    if not any(lane.calls for lane in found):
        return
    shown = _chosen(found)
    start, end = _window(found)
    picture = _Picture(shown, start, end)
    names = node("div", *(node("div", f"rank {lane.rank}") for lane in shown), class_="lanes")
    size = {"width": "100%", "height": len(shown) * ROW + 20}
    drawing = node("svg", *picture.parts(), **size, role="img", aria_label="the calls of each rank", class_="calls")
    yield node("div", names, node("div", drawing, class_="scroll"), class_="chart")
    if len(shown) < len(found):
        yield node("p", f"{len(shown)} of {len(found)} ranks: of those that did the same, the first", class_="facts")


def _chosen(found: Sequence[RankLane]) -> Sequence[RankLane]:
    if len(found) <= MOST_LANES:
        return found
    alike = groups(found, lambda lane: (lane.how, *((call.name, call.is_over) for call in lane.calls[-1:])))
    few = [lane for group in sorted(alike, key=len) for lane in group[:_ALIKE]][:MOST_LANES]
    return sorted(few, key=lambda lane: lane.rank)


def _window(found: Sequence[RankLane]) -> tuple[float, float]:
    """The time to draw: from the first call to the last one, or the seconds before that, with a margin."""
    times = [call.at for lane in found for call in lane.calls]
    length = min(_LONGEST, max(max(times) - min(times), _SHORTEST))
    start = max(min(lane.began for lane in found), max(times) - length * (1 + _BEFORE))
    return start, max(times) + length * _AFTER


class _Picture:
    """Draws lanes between two moments; positions are percentages."""

    def __init__(self, lanes: Sequence[RankLane], start: float, end: float):
        self._lanes = lanes
        self._start = start
        self._length = end - start
        self._meetings = meetings(lanes)
        self._bars = bars(lanes, self._meetings)

    def parts(self) -> Iterator[ET.Element]:
        for row, lane in enumerate(self._lanes):
            yield from self._lane(row, lane)
        rows = {lane.rank: row for row, lane in enumerate(self._lanes)}
        for calls in self._meetings:
            (first, one), (last, other) = calls[0], calls[-1]
            y1, y2 = (rows[rank] * ROW + ROW / 2 for rank in (first, last))
            if one.at >= self._start and y1 != y2:
                kind = "arrow" if all(call.is_over for _, call in calls) else "arrow waits"
                at = {"x1": self._x(one.at), "y1": y1, "x2": self._x(other.at), "y2": y2}
                yield node("line", class_=kind, **at, marker_end="url(#arrow)")
        y = len(self._lanes) * ROW + 14
        whole = max(lane.ended for lane in self._lanes) - min(lane.began for lane in self._lanes)
        words = f"{self._length:.2g} s of {whole:.2g} s; an arrow leads to the rank that came last"
        yield node("text", words, class_="axis", x=0, y=y)

    def _lane(self, row: int, lane: RankLane) -> Iterator[ET.Element]:
        y = row * ROW + (ROW - BAR) / 2
        life = {"x": self._x(lane.began), "width": f"{self._share(lane.began, lane.ended) * 100:.3f}%"}
        yield node("rect", class_="unit", **life, y=y, height=BAR)
        yield from (self._bar(y, bar) for bar in self._bars if bar.rank == lane.rank and bar.until >= self._start)

    def _bar(self, y: float, bar: CallBar) -> ET.Element:
        """The bar of a call, in a box that is as long as there is nothing else."""
        box, over = (self._share(bar.call.at, at) for at in (bar.until, bar.over))
        shape = node("rect", style=f"width: max(5px, {over / box * 100 if box else 0:.2f}%)", height=BAR)
        title = node("title", f"rank {bar.rank}: {bar.call.name}\n{bar.call.site}")
        words = node("text", bar.call.name, x=7, y=BAR - 3)
        kind = "call" if bar.call.is_over else "call waits"
        place = {"x": self._x(bar.call.at), "width": f"{box * 100:.3f}%"}
        return node("svg", title, shape, words, class_=kind, **place, y=y, height=BAR)

    def _at(self, time: float) -> float:
        return min(1.0, max(0.0, (time - self._start) / self._length))

    def _share(self, began: float, ended: float) -> float:
        return max(0.0, self._at(ended) - self._at(began))

    def _x(self, at: float) -> str:
        return f"{self._at(at) * 100:.3f}%"
