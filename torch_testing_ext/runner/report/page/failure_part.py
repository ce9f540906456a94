"""A failure in the page: a table of its ranks, the lines of the source, and a lane for each rank."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from torch_testing_ext._collectives.failure import Cell, CodeLine, FailureView, Value
from torch_testing_ext._collectives.lanes_of_ranks import CallBar, RankLane, bars, meetings
from torch_testing_ext._process.words import group_by
from torch_testing_ext.runner.model import Attempt
from torch_testing_ext.runner.report import wording
from torch_testing_ext.runner.report.xml_elements import Element, Elements, xml_element

from .wait_graph import wait_graph

# Heights, in pixels.
ROW = 20
FAILURE_BAR = 14
MOST_LANES = 16
# Lanes that are drawn of ranks that did the same, where there are too many.
_ALIKE = 3
# Seconds before the last call that are drawn.
_LONGEST_LANE = 10.0
_SHORTEST_LANE = 2e-3
# The parts of a lane that are drawn before and after it.
_BEFORE = 0.05
_AFTER = 0.4

_KEYWORD = re.compile(
    r"(?P<comment>#.*)|(?P<string>[rbf]*(?:\"[^\"]*\"|'[^']*'))|"
    r"\b(?P<word>if|else|elif|for|while|return|raise|def|class|with|try|except|finally|import|from|in|not|and|or|as|"
    r"assert|lambda|yield|pass|None|True|False|is|del|async|await)\b"
)


def render_failure(attempt: Attempt) -> Elements:
    """The parts of a failure; another one as its text says it."""
    view = attempt.failure
    if view is None or view.text is not None:
        yield xml_element("pre", wording.screen(attempt), class_="message")
        return
    parts = view.parts(in_page=True)
    yield xml_element("p", parts.title, class_="headline")
    if parts.table:
        yield xml_element("table", *map(_row, parts.table), class_="ranks")
    if parts.code:
        yield xml_element("pre", *_code(parts.code, view), class_="code")
    lines = [*parts.values, *map(Value, parts.remarks)]
    lines += [Value(line) for note in parts.notes for line in note.split("\n") if line]
    if lines:
        spans = (xml_element("span", f"{line.text}\n", class_=line.kind.value) for line in lines)
        yield xml_element("pre", *spans, class_="values")
    yield from wait_graph(view.waits)
    yield from lanes_of_failure([rank.lane for rank in attempt.ranks if rank.lane is not None])


def _row(cell: Cell) -> Element:
    place = xml_element("td", str(cell.site or ""), class_="place")
    return xml_element("tr", xml_element("th", cell.ranks, scope="row"), xml_element("td", cell.did), place)


def _code(code: Sequence[CodeLine], view: FailureView) -> Elements:
    """The lines, each with its number: that of the culprit, and that of the others, have a colour."""
    culprit = view.rows[0].site if view.rows else None
    for line in code:
        kind = None
        if line.is_at_fault:
            kind = "culprit" if culprit is None or culprit.line == line.number else "other"
        number = xml_element("i", f"{line.number:>5}  ")
        yield xml_element("span", number, *_tokens(line.text), "\n", class_=kind)


def _tokens(line: str) -> Iterator[Element | str]:
    """The words of a line of Python: keywords, strings and comments as elements, the rest as text."""
    position = 0
    for match in _KEYWORD.finditer(line):
        yield line[position : match.start()]
        yield xml_element("b", match[0], class_=match.lastgroup)
        position = match.end()
    yield line[position:]


def lanes_of_failure(lanes: Sequence[RankLane]) -> Elements:
    """A lane for each rank, with its calls, and arrows to the rank that came last, or never came."""
    if not any(lane.calls for lane in lanes):
        return
    drawn = _chosen(lanes)
    start, end = _window(lanes)
    picture = _Picture(drawn, start, end)
    names = [xml_element("div", f"rank {lane.rank}") for lane in drawn]
    drawing = xml_element(
        "svg",
        *picture.parts(),
        width="100%",
        height=len(drawn) * ROW + 20,
        role="img",
        aria_label="the calls of each rank",
        class_="calls",
    )
    column = xml_element("div", *names, class_="lanes")
    yield xml_element("div", column, xml_element("div", drawing, class_="scroll"), class_="chart")
    if len(drawn) < len(lanes):
        words = f"{len(drawn)} of {len(lanes)} ranks: of those that did the same, the first"
        yield xml_element("p", words, class_="facts")


def _chosen(lanes: Sequence[RankLane]) -> Sequence[RankLane]:
    """The lanes to draw: all or, of many, the first of each group that did the same, the smallest group first."""
    if len(lanes) <= MOST_LANES:
        return lanes
    groups = group_by(lanes, _end_of_lane)
    groups.sort(key=len)
    firsts = [lane for group in groups for lane in group[:_ALIKE]]
    return sorted(firsts[:MOST_LANES], key=lambda lane: lane.rank)


def _end_of_lane(lane: RankLane) -> object:
    last = lane.calls[-1] if lane.calls else None
    return lane.how, last and (last.name, last.is_over)


def _window(lanes: Sequence[RankLane]) -> tuple[float, float]:
    """The time to draw: from the first call to the last one, or the seconds before that, with a margin."""
    times = [call.at for lane in lanes for call in lane.calls]
    length = min(_LONGEST_LANE, max(max(times) - min(times), _SHORTEST_LANE))
    began = min(lane.began for lane in lanes)
    start = max(began, max(times) - length * (1 + _BEFORE))
    return start, max(times) + length * _AFTER


class _Picture:
    """Draws lanes between two moments; positions are percentages."""

    def __init__(self, lanes: Sequence[RankLane], start: float, end: float):
        self._lanes = lanes
        self._start = start
        self._length = end - start
        self._meetings = meetings(lanes)
        self._bars = bars(lanes, self._meetings)

    def parts(self) -> Elements:
        for row, lane in enumerate(self._lanes):
            yield from self._lane(row, lane)
        yield from self._arrows()
        ended = max(lane.ended for lane in self._lanes)
        whole = ended - min(lane.began for lane in self._lanes)
        words = f"{self._length:.2g} s of {whole:.2g} s; an arrow leads to the rank that came last, or never"
        yield xml_element("text", words, class_="axis", x=0, y=len(self._lanes) * ROW + 14)

    def _arrows(self) -> Elements:
        """An arrow for each collective, from its first rank to the last one, or to one that never came."""
        rows = {lane.rank: row for row, lane in enumerate(self._lanes)}
        ended = {lane.rank: lane.ended for lane in self._lanes}
        for meeting in self._meetings:
            first_rank, first = meeting.calls[0]
            last_rank, at = meeting.last
            if first.at < self._start or first_rank == last_rank:
                continue
            kind = "arrow" if all(call.is_over for _, call in meeting.calls) else "arrow waits"
            yield xml_element(
                "line",
                class_=kind,
                x1=self._x(first.at),
                y1=rows[first_rank] * ROW + ROW / 2,
                x2=self._x(ended[last_rank] if at is None else at),
                y2=rows[last_rank] * ROW + ROW / 2,
                marker_end="url(#arrow)",
            )

    def _lane(self, row: int, lane: RankLane) -> Elements:
        y = row * ROW + (ROW - FAILURE_BAR) / 2
        width = f"{self._share(lane.began, lane.ended) * 100:.3f}%"
        yield xml_element("rect", class_="unit", x=self._x(lane.began), width=width, y=y, height=FAILURE_BAR)
        for bar in self._bars:
            if bar.rank == lane.rank and bar.until >= self._start:
                yield self._bar(y, bar)

    def _bar(self, y: float, bar: CallBar) -> Element:
        """The bar of a call, in a box that is as long as there is nothing else."""
        box = self._share(bar.call.at, bar.until)
        length = self._share(bar.call.at, bar.over) / box if box else 0
        shape = xml_element("rect", style=f"width: max(5px, {length * 100:.2f}%)", height=FAILURE_BAR)
        title = xml_element("title", f"rank {bar.rank}: {bar.call.name}\n{bar.call.site}")
        words = xml_element("text", bar.call.name, x=7, y=FAILURE_BAR - 3)
        kind = "call" if bar.call.is_over else "call waits"
        return xml_element(
            "svg",
            title,
            shape,
            words,
            class_=kind,
            x=self._x(bar.call.at),
            width=f"{box * 100:.3f}%",
            y=y,
            height=FAILURE_BAR,
        )

    def _at(self, time: float) -> float:
        return min(1.0, max(0.0, (time - self._start) / self._length))

    def _share(self, began: float, ended: float) -> float:
        return max(0.0, self._at(ended) - self._at(began))

    def _x(self, at: float) -> str:
        return f"{self._at(at) * 100:.3f}%"
