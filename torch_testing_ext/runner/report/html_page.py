"""The run as one HTML file.

Pure: results come in, text comes out.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import shlex
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from string import Template

from torch_testing_ext._collectives.failure import (
    CallBar,
    Cell,
    CodeLine,
    FailureView,
    RankLane,
    RankWait,
    Value,
    WorldView,
    bars,
    meetings,
)
from torch_testing_ext._process import user_commands
from torch_testing_ext._process.logs import without_accidents
from torch_testing_ext._process.words import group_by, list_of
from torch_testing_ext.runner.model import Attempt, Category, FinishedTest, Summary, TestId, TestOutcome

from . import console_report, text
from .journal import History, Lane, all_lanes
from .text import xml_element

Element = ET.Element
Elements = Iterator[Element]
# A place in a picture: x and y.
Point = tuple[float, float]
# A test and its repetition.
TestKey = tuple[TestId, int]

# --------------------------------------------------------------------------------------------------------------------
# The picture of ranks that wait for each other: an arrow leads from each to those that it waits for. Pure.

# In pixels.
WIDTH = 860
BOX = 24
RADIUS = 130
# How far an arrow bends away from the middle, as a part of its length.
_CURVE = 0.3


def wait_graph(waits: Sequence[RankWait]) -> Elements:
    """The picture of waits; nothing if there are none."""
    if not waits:
        return
    boxes = _boxes(waits)
    height = 120 + 40 * len(boxes)
    places = _around(list(boxes), height)
    arrows = _arrows(waits, boxes)
    parts: list[Element] = []
    for (name, other), words in arrows.items():
        returns = (other, name) in arrows
        parts += _arrow(words, places[name], places[other], 0 if returns else height / 2)
    parts += [_box(name, place) for name, place in places.items()]
    view = f"0 0 {WIDTH} {height}"
    label = "ranks that wait for each other"
    yield xml_element("svg", *parts, viewBox=view, width=WIDTH, class_="wait-graph", role="img", aria_label=label)


def _boxes(waits: Sequence[RankWait]) -> dict[str, set[int]]:
    """The ranks in each box, by its name: those that wait alike, and those that they miss and that do not wait."""
    boxes = {list_of(wait.ranks): set(wait.ranks) for wait in waits}
    for wait in waits:
        in_no_box = set(wait.missing).difference(*boxes.values())
        if in_no_box:
            boxes[list_of(wait.missing)] = in_no_box
    return boxes


def _arrows(waits: Sequence[RankWait], boxes: Mapping[str, set[int]]) -> dict[tuple[str, str], str]:
    """The call to write beside each arrow, by the names of the boxes where it begins and ends."""
    arrows = {}
    for wait in waits:
        name = list_of(wait.ranks)
        words = wait.call
        if wait.site:
            words += f", {os.path.basename(wait.site.file)}:{wait.site.line}"
        for other, ranks in boxes.items():
            if other != name and not ranks.isdisjoint(wait.missing):
                arrows[name, other] = words
    return arrows


def _around(names: list[str], height: int) -> dict[str, Point]:
    """A place for each box, on an ellipse."""
    x, y = WIDTH / 2, height / 2
    half_height = y - 2 * BOX
    places = {}
    for number, name in enumerate(names):
        # The first one is on the left.
        angle = math.pi + 2 * math.pi * number / len(names)
        places[name] = x + RADIUS * math.cos(angle), y + half_height * math.sin(angle)
    return places


def _box(name: str, place: Point) -> Element:
    x, y = place
    width = 20 + 7 * len(name)
    frame = xml_element("rect", x=f"{x - width / 2:.0f}", y=f"{y - BOX / 2:.0f}", width=width, height=BOX, rx=6)
    words = xml_element("text", name, x=f"{x:.0f}", y=f"{y + 4:.0f}", text_anchor="middle")
    return xml_element("g", frame, words)


def _arrow(words: str, start: Point, end: Point, centre: float) -> Elements:
    """A curve to the other box and the call beside it. `centre`: it bends away from this height; 0: from its return."""
    x1, y1 = start
    x2, y2 = end
    middle_x, middle_y = (x1 + x2) / 2, (y1 + y2) / 2
    across_x, across_y = y1 - y2, x2 - x1
    outwards = across_x * (middle_x - WIDTH / 2) + across_y * (middle_y - centre)
    bend = -_CURVE if centre and outwards < 0 else _CURVE
    # The point that the curve is drawn to; it does not reach it.
    bend_x, bend_y = middle_x + bend * across_x, middle_y + bend * across_y
    # The arrow ends in front of the box.
    before_box = BOX + abs(x2 - bend_x) / 8
    share = min(1.0, before_box / (math.dist((bend_x, bend_y), end) or 1.0))
    x2, y2 = x2 + (bend_x - x2) * share, y2 + (bend_y - y2) * share
    curve = f"M {x1:.0f} {y1:.0f} Q {bend_x:.0f} {bend_y:.0f} {x2:.0f} {y2:.0f}"
    yield xml_element("path", d=curve, marker_end="url(#arrow)")
    yield _label(words, ((middle_x + bend_x) / 2, (middle_y + bend_y) / 2), middle_y)


def _label(words: str, place: Point, middle: float) -> Element:
    """The words beside an arrow, outside of it. `middle`: the height of the middle between its ends."""
    x, y = place
    if abs(x - WIDTH / 2) < BOX:
        side = "middle"
        y += 16 if y > middle else -8
    elif x > WIDTH / 2:
        side = "start"
        x += 8
        y += 4
    else:
        side = "end"
        x -= 8
        y += 4
    return xml_element("text", words, x=f"{x:.0f}", y=f"{y:.0f}", text_anchor=side)


# --------------------------------------------------------------------------------------------------------------------
# A failure in the page: a table of its ranks, the lines of the source, and a lane for each rank. Pure.

# Heights, in pixels.
ROW = 20
FAILURE_BAR = 14
MOST_LANES = 16
# Lanes that are drawn of ranks that did the same, where there are too many.
_ALIKE = 3
# Seconds before the last call that are drawn.
_LONGEST = 10.0
_SHORTEST = 2e-3
# Parts of them that are drawn besides.
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
        yield xml_element("pre", text.screen(attempt), class_="message")
        return
    parts = view.parts()
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
    """A lane for each rank, with its calls, and an arrow from the first to come to the last one."""
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
    length = min(_LONGEST, max(max(times) - min(times), _SHORTEST))
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
        words = f"{self._length:.2g} s of {whole:.2g} s; an arrow leads to the rank that came last"
        yield xml_element("text", words, class_="axis", x=0, y=len(self._lanes) * ROW + 14)

    def _arrows(self) -> Elements:
        """An arrow for each collective, from the first rank that has called it to the last one."""
        rows = {lane.rank: row for row, lane in enumerate(self._lanes)}
        for calls in self._meetings:
            first_rank, first = calls[0]
            last_rank, last = calls[-1]
            if first.at < self._start or first_rank == last_rank:
                continue
            kind = "arrow" if all(call.is_over for _, call in calls) else "arrow waits"
            yield xml_element(
                "line",
                class_=kind,
                x1=self._x(first.at),
                y1=rows[first_rank] * ROW + ROW / 2,
                x2=self._x(last.at),
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


# --------------------------------------------------------------------------------------------------------------------
# The traffic of a whole world, as a table: who sends how much to whom. Pure.


def render_world(view: WorldView) -> Elements:
    """The facts about a world, the lines that were not judged, and the matrix of its traffic."""
    yield xml_element("p", text.world_in_words(view), class_="facts")
    if view.not_judged:
        lines = [xml_element("li", line) for line in view.not_judged]
        words = "not judged, since values were not communicated:"
        yield xml_element("div", words, xml_element("ul", *lines), class_="facts")
    most = max(map(max, view.traffic), default=0)
    if not most:
        return
    blocks = [view.block_of(number) for number in range(len(view.traffic))]
    names = [str(block[0]) if len(block) == 1 else f"{block[0]}-{block[-1]}" for block in blocks]
    unit, word = max((scale for scale in _SCALES if scale[0] <= most), default=_SCALES[0])
    caption = f"{word} that the ranks of a row send to those of a column"
    head = xml_element("tr", xml_element("td"), *(xml_element("th", name, scope="col") for name in names))
    rows = [head]
    for name, row in zip(names, view.traffic, strict=True):
        cells = [_amount(amount, most, unit) for amount in row]
        rows.append(xml_element("tr", xml_element("th", name, scope="row"), *cells))
    table = xml_element("table", xml_element("caption", caption), *rows, class_="traffic")
    yield xml_element("div", table, class_="scroll", tabindex="0", role="region", aria_label=caption)


_SCALES = ((1, "bytes"), (1 << 10, "KiB"), (1 << 20, "MiB"), (1 << 30, "GiB"), (1 << 40, "TiB"))


def _amount(amount: int, most: int, unit: int) -> Element:
    """A cell, which is the darker the more is sent; nothing is an empty one."""
    if not amount:
        return xml_element("td")
    words = f"{amount / unit:.3g}"
    return xml_element("td", words, style=f"--share: {amount / most * 35:.0f}%", title=f"{amount} bytes")


# --------------------------------------------------------------------------------------------------------------------
# The run as one HTML file, which refers to nothing outside it and is complete without JavaScript. Pure.

HERE = Path(__file__).parent / "page"
# The most important first.
ORDER = (Category.FAILED, Category.PASSED, Category.SKIPPED)
# How the reader may sort the tests; page.js sorts by the attribute `data-` of the first word.
SORTS = {
    "rank": "most important first",
    "seconds": "longest first",
    "began": "in the order of their start",
    "name": "by name",
}
# Heights in the timeline, in pixels.
LANE = 22
BAR = 14
AXIS = 24
MOST_TICKS = 8


def render_page(history: History, command: str = "") -> str:
    """The HTML page. `command` runs the tests whose names are appended to it."""
    parts = _body(history, command or user_commands.runner())
    body = "\n".join(ET.tostring(part, encoding="unicode", method="html") for part in parts)
    asset = {kind: (HERE / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js")}
    title = f"{headline(history.summary)}: {user_commands.runner_name()}"
    return Template(asset["html"]).substitute(title=title, body=body, style=asset["css"], script=asset["js"])


def headline(summary: Summary) -> str:
    """The result of the run in a few words."""
    failed = summary.count(Category.FAILED)
    if summary.error:
        return f"Internal error of the runner: {text.count(failed, 'failure')} so far"
    if summary.interrupted:
        return f"Interrupted: {text.count(failed, 'failure')} so far"
    if failed:
        return f"{failed} of {text.count(len(summary.finished), 'test')} failed"
    passed = summary.count(Category.PASSED)
    return f"{text.count(passed, 'test')} passed" if passed else "No test passed or failed"


def _body(history: History, command: str) -> Elements:
    page = _Page(history, command)
    yield page.header()
    yield page.shares()
    yield from page.warnings()
    has_failures = bool(history.summary.failures)
    if not has_failures:
        yield page.timeline()
    yield from page.causes()
    yield page.tests()
    if has_failures:
        yield page.timeline()
    yield from page.skips()


class _Page:
    """The parts of the page."""

    def __init__(self, history: History, command: str):
        self._history = history
        self._summary = history.summary
        self._command = command
        self._ordered = sorted(self._summary.finished, key=self._rank)
        self._anchors = {_key(finished): f"test-{number}" for number, finished in enumerate(self._ordered, 1)}
        # In the order of the page.
        self._counts = Counter(finished.outcome for finished in self._ordered)

    def _rank(self, finished: FinishedTest) -> tuple[int, int, float]:
        """Sorts failures first, then tests that did not pass cleanly, then passes, then skips; long ones first.

        Of the failures, those of tests on ranks come first, and files that could not be imported come last.
        """
        verdict = self._summary.policy.verdict_on(finished)
        if verdict is Category.FAILED:
            on_ranks = finished.test.world_size > 1 or any(attempt.ranks for attempt in finished.attempts)
            is_file = not finished.test.id.cls and not finished.test.id.method
            detail = 0 if on_ranks else 2 if is_file else 1
        else:
            detail = int(finished.outcome is TestOutcome.PASSED)
        return ORDER.index(verdict), detail, -finished.seconds

    def header(self) -> Element:
        began = datetime.fromtimestamp(self._history.run.clock, timezone.utc)
        when = xml_element("time", f"{began:%Y-%m-%d %H:%M} UTC", datetime=began.isoformat(timespec="seconds"))
        heading = xml_element("h1", headline(self._summary))
        left = xml_element("div", heading, xml_element("p", when, self._facts(), class_="facts"))
        theme = xml_element("button", "light / dark", id="theme", type="button")
        facts = text.header_facts(self._history.run.header)
        origin = [xml_element("div", xml_element("dt", name), xml_element("dd", value)) for name, value in facts]
        title = xml_element("div", left, theme, class_="title")
        return xml_element("header", title, xml_element("dl", *origin, class_="origin"))

    def _facts(self) -> str:
        run = self._history.run
        facts = [text.duration(self._summary.seconds), *text.resources(run)]
        if run.seed is not None:
            facts.append(f"seed {run.seed}")
        return "".join(f" \N{MIDDLE DOT} {fact}" for fact in facts)

    def shares(self) -> Element:
        """The share of each outcome, as one bar."""
        parts = []
        for outcome, number in self._counts.items():
            title = f"{number} {outcome.value}"
            parts.append(xml_element("span", class_=css_class(outcome.value), style=f"flex: {number}", title=title))
        return xml_element("div", *parts, class_="share")

    def warnings(self) -> Elements:
        if self._summary.error:
            yield xml_element("pre", text.printable(self._summary.error), class_="card warning")
        for warning in self._summary.warnings:
            yield xml_element("p", warning, class_="card warning")
        if self._summary.unfinished:
            unfinished = text.count(len(self._summary.unfinished), "test")
            names = [xml_element("li", text.printable(str(test.id))) for test in self._summary.unfinished]
            title = xml_element("summary", f"{unfinished} did not finish: {text.why_unfinished(self._summary)}")
            yield xml_element("details", title, xml_element("ul", *names), class_="card warning")

    def timeline(self) -> Element:
        zoom = xml_element("input", type="range", id="zoom", min=0, max=6, step=0.25, value=0, aria_label="zoom")
        heading = xml_element("h2", "Timeline: what ran where, and when")
        head = xml_element("div", heading, xml_element("label", "zoom ", zoom), class_="head")
        # A column of its own, which stays visible when the timeline scrolls.
        names = [xml_element("div", lane.name, title=lane.name) for lane in all_lanes(self._history)]
        column = xml_element("div", *names, class_="lanes")
        links = {key: f"#{anchor}" for key, anchor in self._anchors.items()}
        zoomed = xml_element("div", render_timeline(self._history, links), class_="zoomed")
        drawing = xml_element("div", zoomed, class_="scroll")
        return xml_element("section", head, xml_element("div", column, drawing, class_="chart"), class_="card")

    def tests(self) -> Element:
        hint = "Search names, messages and logs ( / )"
        search = xml_element("input", type="search", id="search", placeholder=hint, aria_label=hint)
        options = [xml_element("option", words, value=key) for key, words in SORTS.items()]
        sorts = xml_element("select", *options, id="sort")
        tools = xml_element("div", search, *self._chips(), xml_element("label", "sort ", sorts), class_="tools")
        tests = [self._test(number, finished) for number, finished in enumerate(self._ordered)]
        rows = xml_element("div", *tests, id="tests")
        heading = xml_element("h2", "Tests", class_="unseen")
        return xml_element("section", heading, tools, rows, xml_element("p", id="shown", role="status"), class_="card")

    def causes(self) -> Elements:
        """The causes that several tests have failed for, with links to these."""
        rows = []
        for group in console_report.by_cause(self._summary.failures, self._summary.policy):
            if len(group) == 1:
                continue
            names: list[Element | str] = []
            for finished in group:
                name = finished.test.id.dotted or finished.test.id.file
                names += [xml_element("a", name, href=f"#{self._anchors[_key(finished)]}"), " "]
            last_failure = console_report.failing_attempts(group[0], self._summary.policy)[-1]
            cause = xml_element("span", f"{text.reason(last_failure)} ", xml_element("span", *names, class_="facts"))
            rows.append(xml_element("li", xml_element("b", str(len(group))), cause))
        if rows:
            yield _list_of_reasons("Failures with the same cause", rows)

    def _chips(self) -> Elements:
        for outcome, number in self._counts.items():
            kind = f"chip {css_class(outcome.value)}"
            parts = [xml_element("span", class_="dot"), xml_element("b", str(number)), outcome.value]
            data = {"data_outcome": outcome.value, "aria_pressed": "false"}
            yield xml_element("button", *parts, class_=kind, type="button", **data)

    def _test(self, number: int, finished: FinishedTest) -> Element:
        """The first failure is unfolded, since most readers look for it."""
        unfolded = number == 0 and self._summary.policy.verdict_on(finished) is Category.FAILED
        return xml_element(
            "details",
            self._line(finished),
            xml_element("div", *self._details(finished), class_="body"),
            class_=f"test {css_class(finished.outcome.value)}",
            id=self._anchors[_key(finished)],
            data_outcome=finished.outcome.value,
            data_rank=number,
            data_seconds=f"{finished.seconds:.6f}",
            data_began=f"{finished.attempts[0].began:.6f}",
            data_name=text.name(finished.last, self._history.run.repetitions),
            open="" if unfolded else None,
        )

    def _line(self, finished: FinishedTest) -> Element:
        failed = [attempt for attempt in finished.attempts if attempt.said]
        why = xml_element("div", text.title(failed[-1]) if failed else "", class_="why")
        name = xml_element("div", *self._name(finished), why)
        dot = xml_element("span", class_="dot", title=finished.outcome.value)
        return xml_element("summary", dot, name, xml_element("span", *_took(finished), class_="took"))

    def _name(self, finished: FinishedTest) -> Elements:
        test = finished.test.id
        *before, last = (part for part in (test.file, test.cls, test.method) if part)
        prefix = xml_element("span", "".join(f"{part}::" for part in before), class_="file")
        last += text.repetition(finished.last, self._history.run.repetitions)
        yield xml_element("div", prefix, xml_element("b", last), class_="name")

    def _details(self, finished: FinishedTest) -> Elements:
        yield xml_element("p", self._circumstances(finished), class_="facts")
        rerun = xml_element("code", f"{self._command} {shlex.quote(str(finished.test.id))}")
        yield xml_element("div", rerun, xml_element("button", "copy", class_="copy", type="button"), class_="rerun")
        seen: set[str] = set()
        for attempt in finished.attempts:
            pattern = without_accidents(text.screen(attempt))
            alike = ", in the same way as before" if pattern and pattern in seen else ""
            seen.add(pattern)
            if len(finished.attempts) > 1:
                yield xml_element("p", f"attempt {attempt.number}: {attempt.outcome.value}{alike}", class_="attempt")
            yield from _attempt(attempt, bool(alike))
        yield from _sweep(finished.last)

    def _circumstances(self, finished: FinishedTest) -> str:
        world_size = finished.test.world_size
        place = text.place(finished.last.lease)
        want = finished.last.end.want
        parts = [
            text.outcome_in_words(finished),
            f"{world_size} ranks" if world_size > 1 else "",
            f"on {place}" if place else "",
            text.memory(finished.last),
            text.not_enough_devices(want) if want else "",
        ]
        return " \N{MIDDLE DOT} ".join(filter(None, parts))

    def skips(self) -> Elements:
        names = text.not_reached(self._summary)
        if names:
            rows = [xml_element("li", xml_element("span", text.printable(name))) for name in names]
            yield _list_of_reasons("Names that no run has reached", rows)
        reasons = text.skip_reasons(self._summary)
        if reasons:
            rows = [
                xml_element("li", xml_element("b", str(number)), xml_element("span", why)) for why, number in reasons
            ]
            yield _list_of_reasons("Skipped tests, by reason", rows)


def _list_of_reasons(title: str, rows: Sequence[Element]) -> Element:
    head = xml_element("div", xml_element("h2", title), class_="head")
    return xml_element("section", head, xml_element("ul", *rows, class_="reasons rest"), class_="card")


def _sweep(attempt: Attempt) -> Elements:
    """The tables of what each fault did to a test, by point and rank."""
    report = attempt.end.sweep
    if report is None:
        return
    if report.why_not:
        yield xml_element("p", f"Not drilled: {report.why_not}", class_="facts")
    for matrix in text.matrices(report):
        head = xml_element("tr", *(xml_element("th", word) for word in matrix.head))
        rows = []
        for title, columns in matrix.rows:
            cells = []
            for of_cell in columns:
                ends = of_cell[0].end.value if of_cell else ""
                titles = "\n".join(dict.fromkeys(f"{cell.fault} {cell.place} {cell.title}" for cell in of_cell))
                words = text.cell_words(of_cell)
                cells.append(xml_element("td", words, class_=css_class(ends), title=text.printable(titles)))
            rows.append(xml_element("tr", xml_element("th", title), *cells))
        yield xml_element("table", head, *rows, class_="sweep")
    told = [f"{heading}: {line}" for heading, lines, _ in text.told_of_drill(report) for line in lines]
    if told:
        yield xml_element("ul", *(xml_element("li", line) for line in told))


def _attempt(attempt: Attempt, is_known: bool = False) -> Elements:
    """The message of an attempt, unless it `is_known`, and all else folded."""
    if attempt.said and not is_known:
        yield xml_element("div", *render_failure(attempt), class_=f"failure {css_class(attempt.outcome.value)}")
    for view in attempt.end.worlds:
        yield from render_world(view)
    if attempt.end.leftovers:
        yield xml_element("p", f"Left running (now terminated): {'; '.join(attempt.end.leftovers)}", class_="facts")
    folded = []
    if text.has_parts(attempt):
        folded.append(_log("the whole account", text.account(attempt)))
    folded += [_log(title, words) for title, words in text.logs(attempt)]
    yield xml_element("div", *folded, class_="logs")


def _log(title: str, words: str) -> Element:
    return xml_element("details", xml_element("summary", title), xml_element("pre", words), class_="log")


def _took(finished: FinishedTest) -> Iterator[Element | str]:
    """The duration of a test, and its outcome unless it passed: colour alone is not enough for every reader."""
    if finished.outcome is not TestOutcome.PASSED:
        yield xml_element("span", finished.outcome.value, class_="word")
    if finished.outcome is not TestOutcome.SKIPPED:
        yield text.duration(finished.seconds)


def _key(finished: FinishedTest) -> TestKey:
    return finished.test.id, finished.last.repetition


# -- the timeline


def render_timeline(history: History, links: dict[TestKey, str]) -> Element:
    """An SVG element with a bar for each test on each of its lanes.

    `links` has the address of each test in the page, by test and repetition. Positions on the time axis are
    percentages, so that the timeline fits any width without distorting its text.
    """
    rows = all_lanes(history)
    length = max([history.summary.seconds, *(span.ended for span in history.spans)], default=0.0) or 1.0
    height = len(rows) * LANE + AXIS
    draw = _Timeline(length, height, history.run.repetitions, links)
    parts = list(draw.axis())
    for number, lane in enumerate(rows):
        parts += draw.lane(lane, number)
    look = {"class_": "timeline", "width": "100%", "role": "group", "aria_label": "timeline"}
    return xml_element("svg", *parts, **look, height=height)


@dataclass
class _Timeline:
    """Draws the parts of the timeline, at the scale of the run."""

    length: float
    height: int
    repetitions: int
    links: dict[TestKey, str]

    def axis(self) -> Elements:
        step = tick_step(self.length)
        # A label at the very end would be cut off.
        for number in range(int(self.length * 0.97 / step) + 1):
            x = self._percent(number * step)
            yield xml_element("line", class_="tick", x1=x, x2=x, y1=0, y2=self.height - AXIS + 4)
            yield xml_element("text", _seconds(number * step), class_="axis", x=x, y=self.height - 6)

    def lane(self, lane: Lane, number: int) -> Elements:
        y = number * LANE
        yield xml_element("line", class_="lane", x1=0, x2="100%", y1=y + LANE, y2=y + LANE)
        for span in lane.spans:
            yield self._bar(span.began, span.ended, y, "unit")
        for attempt in lane.attempts:
            yield self._test(attempt, y)

    def _test(self, attempt: Attempt, y: float) -> Element:
        bar = self._bar(attempt.began, attempt.began + attempt.seconds, y, f"bar {css_class(attempt.outcome.value)}")
        took = f"{attempt.outcome.value}, {text.duration(attempt.seconds)} on {text.place(attempt.lease)}"
        bar.append(xml_element("title", f"{text.name(attempt, self.repetitions)}\n{took}"))
        link = self.links.get((attempt.test.id, attempt.repetition))
        return xml_element("a", bar, href=link) if link else bar

    def _bar(self, began: float, ended: float, y: float, class_: str) -> Element:
        x = self._percent(began)
        width = self._percent(max(0.0, ended - began))
        return xml_element("rect", class_=class_, x=x, y=y + (LANE - BAR) / 2, width=width, height=BAR)

    def _percent(self, seconds: float) -> str:
        return f"{seconds / self.length * 100:.4f}%"


def css_class(outcome: str) -> str:
    """The CSS class of an outcome."""
    return outcome.replace(" ", "-")


def tick_step(length: float) -> float:
    """A round step (1, 2 or 5 times a power of ten) that gives an axis at most MOST_TICKS labels."""
    steps = (factor * 10.0**exponent for exponent in itertools.count(-3) for factor in (1, 2, 5))
    return next(step for step in steps if length <= step * MOST_TICKS)


def _seconds(value: float) -> str:
    return f"{value:g} s" if value < 120 else f"{value / 60:g} min"
