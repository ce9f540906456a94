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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from string import Template

from torch_testing_ext._collectives.failure import Cell, CodeLine, FailureView, RankWait, Value
from torch_testing_ext._collectives.lanes import CallBar, RankLane, bars, meetings
from torch_testing_ext._process import user_shell
from torch_testing_ext._process.words import list_of
from torch_testing_ext.launch.hang import groups, without_accidents
from torch_testing_ext.runner.model import Attempt, Category, FinishedTest, Summary, TestId, TestOutcome

from . import console_report, text
from .journal import History, Lane, lanes
from .text import node

# --------------------------------------------------------------------------------------------------------------------
# The picture of ranks that wait for each other: an arrow leads from each to those that it waits for. Pure.

WIDTH, BOX, RADIUS = 860, 24, 130  # pixels
_CURVE = 0.3  # how far an arrow bends away from the middle, as a part of its length


def wait_graph(waits: Sequence[RankWait]) -> Iterator[ET.Element]:
    """The picture of waits; nothing if there are none."""
    if not waits:
        return
    boxes = {list_of(wait.ranks): set(wait.ranks) for wait in waits}
    for wait in waits:
        if rest := set(wait.missing).difference(*boxes.values()):
            boxes[list_of(wait.missing)] = rest
    height = 120 + 40 * len(boxes)
    places = _around(list(boxes), height)
    ends: dict[tuple[str, str], str] = {}
    for wait in waits:
        name = list_of(wait.ranks)
        words = f"{wait.call}, {os.path.basename(wait.site.file)}:{wait.site.line}" if wait.site else wait.call
        ends |= {(name, other): words for other, ranks in boxes.items() if ranks & set(wait.missing) and other != name}
    parts = [
        part
        for (name, other), words in ends.items()
        for part in _arrow(words, places[name], places[other], 0 if (other, name) in ends else height / 2)
    ]
    parts += [_box(name, place) for name, place in places.items()]
    view = f"0 0 {WIDTH} {height}"
    label = "ranks that wait for each other"
    yield node("svg", *parts, viewBox=view, width=WIDTH, class_="wait-graph", role="img", aria_label=label)


def _around(names: list[str], height: int) -> dict[str, tuple[float, float]]:
    """A place for each box, on an ellipse."""
    angles = {name: math.pi + 2 * math.pi * number / len(names) for number, name in enumerate(names)}
    x, y, up = WIDTH / 2, height / 2, height / 2 - 2 * BOX
    return {name: (x + RADIUS * math.cos(at), y + up * math.sin(at)) for name, at in angles.items()}


def _box(name: str, place: tuple[float, float]) -> ET.Element:
    width = 20 + 7 * len(name)
    at = {"x": f"{place[0] - width / 2:.0f}", "y": f"{place[1] - BOX / 2:.0f}"}
    words = node("text", name, x=f"{place[0]:.0f}", y=f"{place[1] + 4:.0f}", text_anchor="middle")
    return node("g", node("rect", **at, width=width, height=BOX, rx=6), words)


def _arrow(words: str, start: tuple[float, float], end: tuple[float, float], centre: float) -> Iterator[ET.Element]:
    """A curve to the other box and the call beside it. `centre`: it bends away from this height; 0: from its return."""
    (x1, y1), (x2, y2) = start, end
    middle, across = ((x1 + x2) / 2, (y1 + y2) / 2), (y1 - y2, x2 - x1)
    outwards = across[0] * (middle[0] - WIDTH / 2) + across[1] * (middle[1] - centre)
    bend = -_CURVE if centre and outwards < 0 else _CURVE
    x, y = middle[0] + bend * across[0], middle[1] + bend * across[1]
    near = min(1.0, (BOX + abs(x2 - x) / 8) / (math.dist((x, y), end) or 1.0))
    x2, y2 = x2 + (x - x2) * near, y2 + (y - y2) * near
    yield node("path", d=f"M {x1:.0f} {y1:.0f} Q {x:.0f} {y:.0f} {x2:.0f} {y2:.0f}", marker_end="url(#arrow)")
    x, y = (middle[0] + x) / 2, (middle[1] + y) / 2
    side = "middle" if abs(x - WIDTH / 2) < BOX else "start" if x > WIDTH / 2 else "end"
    below = 4 if side != "middle" else 16 if y > middle[1] else -8
    x += {"start": 8, "end": -8}.get(side, 0)
    yield node("text", words, x=f"{x:.0f}", y=f"{y + below:.0f}", text_anchor=side)


# --------------------------------------------------------------------------------------------------------------------
# A failure in the page: a table of its ranks, the lines of the source, and a lane for each rank. Pure.

ROW, FAILURE_BAR = 20, 14  # heights, in pixels
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
    yield from lanes_of_failure([one.lane for one in attempt.ranks if one.lane is not None])


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


def lanes_of_failure(found: Sequence[RankLane]) -> Iterator[ET.Element]:
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
        y = row * ROW + (ROW - FAILURE_BAR) / 2
        life = {"x": self._x(lane.began), "width": f"{self._share(lane.began, lane.ended) * 100:.3f}%"}
        yield node("rect", class_="unit", **life, y=y, height=FAILURE_BAR)
        yield from (self._bar(y, bar) for bar in self._bars if bar.rank == lane.rank and bar.until >= self._start)

    def _bar(self, y: float, bar: CallBar) -> ET.Element:
        """The bar of a call, in a box that is as long as there is nothing else."""
        box, over = (self._share(bar.call.at, at) for at in (bar.until, bar.over))
        shape = node("rect", style=f"width: max(5px, {over / box * 100 if box else 0:.2f}%)", height=FAILURE_BAR)
        title = node("title", f"rank {bar.rank}: {bar.call.name}\n{bar.call.site}")
        words = node("text", bar.call.name, x=7, y=FAILURE_BAR - 3)
        kind = "call" if bar.call.is_over else "call waits"
        place = {"x": self._x(bar.call.at), "width": f"{box * 100:.3f}%"}
        return node("svg", title, shape, words, class_=kind, **place, y=y, height=FAILURE_BAR)

    def _at(self, time: float) -> float:
        return min(1.0, max(0.0, (time - self._start) / self._length))

    def _share(self, began: float, ended: float) -> float:
        return max(0.0, self._at(ended) - self._at(began))

    def _x(self, at: float) -> str:
        return f"{self._at(at) * 100:.3f}%"


# --------------------------------------------------------------------------------------------------------------------
# The run as one HTML file, which refers to nothing outside it and is complete without JavaScript. Pure.

HERE = Path(__file__).parent / "page"
ORDER = (Category.FAILED, Category.PASSED, Category.SKIPPED)  # the most important first
# How the reader may sort the tests; page.js sorts by the attribute `data-` of the first word.
SORTS = {
    "rank": "most important first",
    "seconds": "longest first",
    "began": "in the order of their start",
    "name": "by name",
}
LANE, BAR, AXIS = 22, 14, 24  # heights in the timeline, in pixels
MOST_TICKS = 8


def render(history: History, command: str = "") -> str:
    """The HTML page. `command` runs the tests whose names are appended to it."""
    parts = _body(history, command or user_shell.runner())
    body = "\n".join(ET.tostring(part, encoding="unicode", method="html") for part in parts)
    asset = {kind: (HERE / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js")}
    title = f"{headline(history.summary)}: {user_shell.runner_name()}"
    return Template(asset["html"]).substitute(title=title, body=body, style=asset["css"], script=asset["js"])


def headline(summary: Summary) -> str:
    """The result of the run in a few words."""
    failed, total = summary.count(Category.FAILED), len(summary.finished)
    if summary.error:
        return f"Internal error of the runner: {text.count(failed, 'failure')} so far"
    if summary.interrupted:
        return f"Interrupted: {text.count(failed, 'failure')} so far"
    if failed:
        return f"{failed} of {text.count(total, 'test')} failed"
    passed = summary.count(Category.PASSED)
    return f"{text.count(passed, 'test')} passed" if passed else "No test passed or failed"


def _body(history: History, command: str) -> Iterator[ET.Element]:
    page = _Page(history, command)
    yield page.header()
    yield page.shares()
    yield from page.warnings()
    first, then = [*page.causes(), page.tests()], [page.timeline()]
    yield from (*first, *then) if history.summary.failures else (*then, *first)
    yield from page.skips()


class _Page:
    """The parts of the page."""

    def __init__(self, history: History, command: str):
        self._history = history
        self._summary = history.summary
        self._command = command
        self._ordered = sorted(self._summary.finished, key=lambda one: (*self._rank(one), -one.seconds))
        self._anchors = {_key(one): f"test-{number}" for number, one in enumerate(self._ordered, 1)}
        self._counts = Counter(one.outcome for one in self._ordered)  # in the order of the page

    def _rank(self, one: FinishedTest) -> tuple[int, int]:
        """Sorts failures first, then tests that did not pass cleanly, then passes, then skips.

        Of the failures, those of tests on ranks come first, and files that could not be imported come last.
        """
        verdict = self._summary.policy.verdict_on(one)
        if verdict is Category.FAILED:
            on_ranks = one.test.world_size > 1 or any(attempt.ranks for attempt in one.attempts)
            is_file = not one.test.id.cls and not one.test.id.method
            detail = 0 if on_ranks else 2 if is_file else 1
        else:
            detail = int(one.outcome is TestOutcome.PASSED)
        return ORDER.index(verdict), detail

    def header(self) -> ET.Element:
        began = datetime.fromtimestamp(self._history.run.clock, timezone.utc)
        when = node("time", f"{began:%Y-%m-%d %H:%M} UTC", datetime=began.isoformat(timespec="seconds"))
        left = node("div", node("h1", headline(self._summary)), node("p", when, self._facts(), class_="facts"))
        theme = node("button", "light / dark", id="theme", type="button")
        facts = text.header_facts(self._history.run.header)
        origin = (node("div", node("dt", name), node("dd", value)) for name, value in facts)
        return node("header", node("div", left, theme, class_="title"), node("dl", *origin, class_="origin"))

    def _facts(self) -> str:
        run = self._history.run
        facts = [text.duration(self._summary.seconds), *text.resources(run)]
        facts += [f"seed {run.seed}"] if run.seed is not None else []
        return "".join(f" \N{MIDDLE DOT} {fact}" for fact in facts)

    def shares(self) -> ET.Element:
        """The share of each outcome, as one bar."""
        parts = [
            node("span", class_=css(outcome.value), style=f"flex: {number}", title=f"{number} {outcome.value}")
            for outcome, number in self._counts.items()
        ]
        return node("div", *parts, class_="share")

    def warnings(self) -> Iterator[ET.Element]:
        if self._summary.error:
            yield node("pre", text.printable(self._summary.error), class_="card warning")
        for one in self._summary.warnings:
            yield node("p", one, class_="card warning")
        if self._summary.unfinished:
            unfinished = text.count(len(self._summary.unfinished), "test")
            names = [node("li", text.printable(str(test.id))) for test in self._summary.unfinished]
            why = text.why_unfinished(self._summary)
            yield node(
                "details",
                node("summary", f"{unfinished} did not finish: {why}"),
                node("ul", *names),
                class_="card warning",
            )

    def timeline(self) -> ET.Element:
        zoom = node("input", type="range", id="zoom", min=0, max=6, step=0.25, value=0, aria_label="zoom")
        head = node(
            "div", node("h2", "Timeline: what ran where, and when"), node("label", "zoom ", zoom), class_="head"
        )
        # A column of its own, which stays visible when the timeline scrolls.
        names = [node("div", lane.name, title=lane.name) for lane in lanes(self._history)]
        links = {key: f"#{anchor}" for key, anchor in self._anchors.items()}
        drawing = node("div", node("div", timeline(self._history, links), class_="zoomed"), class_="scroll")
        return node(
            "section", head, node("div", node("div", *names, class_="lanes"), drawing, class_="chart"), class_="card"
        )

    def tests(self) -> ET.Element:
        hint = "Search names, messages and logs ( / )"
        search = node("input", type="search", id="search", placeholder=hint, aria_label=hint)
        sorts = node("select", *(node("option", words, value=key) for key, words in SORTS.items()), id="sort")
        tools = node("div", search, *self._chips(), node("label", "sort ", sorts), class_="tools")
        rows = node("div", *(self._test(number, one) for number, one in enumerate(self._ordered)), id="tests")
        heading = node("h2", "Tests", class_="unseen")
        return node("section", heading, tools, rows, node("p", id="shown", role="status"), class_="card")

    def causes(self) -> Iterator[ET.Element]:
        """The causes that several tests have failed for, with links to these."""
        groups = [
            group for group in console_report.by_cause(self._summary.failures, self._summary.policy) if len(group) > 1
        ]
        rows = []
        for group in groups:
            links = [
                node("a", one.test.id.dotted or one.test.id.file, href=f"#{self._anchors[_key(one)]}") for one in group
            ]
            names = node("span", *(part for link in links for part in (link, " ")), class_="facts")
            cause = text.reason(console_report.failing_attempts(group[0], self._summary.policy)[-1])
            rows.append(node("li", node("b", str(len(group))), node("span", f"{cause} ", names)))
        if rows:
            head = node("div", node("h2", "Failures with one cause"), class_="head")
            yield node("section", head, node("ul", *rows, class_="reasons rest"), class_="card")

    def _chips(self) -> Iterator[ET.Element]:
        for outcome, number in self._counts.items():
            kind = f"chip {css(outcome.value)}"
            parts = [node("span", class_="dot"), node("b", str(number)), outcome.value]
            yield node("button", *parts, class_=kind, type="button", data_outcome=outcome.value, aria_pressed="false")

    def _test(self, number: int, one: FinishedTest) -> ET.Element:
        """The first failure is unfolded, since most readers look for it."""
        unfolded = number == 0 and self._summary.policy.verdict_on(one) is Category.FAILED
        return node(
            "details",
            self._line(one),
            node("div", *self._details(one), class_="body"),
            class_=f"test {css(one.outcome.value)}",
            id=self._anchors[_key(one)],
            data_outcome=one.outcome.value,
            data_rank=number,
            data_seconds=f"{one.seconds:.6f}",
            data_began=f"{one.attempts[0].began:.6f}",
            data_name=text.name(one.last, self._history.run.repetitions),
            open="" if unfolded else None,
        )

    def _line(self, one: FinishedTest) -> ET.Element:
        titles = (text.title(attempt) for attempt in reversed(one.attempts) if attempt.said)
        why = node("div", next(titles, ""), class_="why")  # of the last that failed
        name = node("div", *self._name(one), why)
        dot = node("span", class_="dot", title=one.outcome.value)
        return node("summary", dot, name, node("span", *_took(one), class_="took"))

    def _name(self, one: FinishedTest) -> Iterator[ET.Element]:
        test = one.test.id
        *before, last = (part for part in (test.file, test.cls, test.method) if part)
        prefix = node("span", "".join(f"{part}::" for part in before), class_="file")
        last += text.repetition(one.last, self._history.run.repetitions)
        yield node("div", prefix, node("b", last), class_="name")

    def _details(self, one: FinishedTest) -> Iterator[ET.Element]:
        yield node("p", self._circumstances(one), class_="facts")
        rerun = node("code", f"{self._command} {shlex.quote(str(one.test.id))}")
        yield node("div", rerun, node("button", "copy", class_="copy", type="button"), class_="rerun")
        seen: set[str] = set()
        for attempt in one.attempts:
            pattern = without_accidents(text.screen(attempt))
            alike = ", in the same way as before" if pattern and pattern in seen else ""
            seen.add(pattern)
            if len(one.attempts) > 1:
                yield node("p", f"attempt {attempt.number}: {attempt.outcome.value}{alike}", class_="attempt")
            yield from _attempt(attempt, bool(alike))

    def _circumstances(self, one: FinishedTest) -> str:
        test, place = one.test, text.place(one.last.lease)
        parts = [text.outcome_in_words(one), *([f"{test.world_size} ranks"] if test.world_size > 1 else [])]
        parts += [f"on {place}"] if place else []
        parts += [used] if (used := text.memory(one.last)) else []
        parts += [text.not_enough_devices(one.last.end.want)] if one.last.end.want else []
        return " \N{MIDDLE DOT} ".join(parts)

    def skips(self) -> Iterator[ET.Element]:
        reasons = text.skip_reasons(self._summary)
        if reasons:
            rows = [node("li", node("b", str(number)), node("span", reason)) for reason, number in reasons]
            head = node("div", node("h2", "Skipped tests, by reason"), class_="head")
            yield node("section", head, node("ul", *rows, class_="reasons rest"), class_="card")


def _attempt(attempt: Attempt, is_known: bool = False) -> Iterator[ET.Element]:
    """The message of an attempt, unless it `is_known`, and all else folded."""
    if attempt.said and not is_known:
        yield node("div", *failure(attempt), class_=f"failure {css(attempt.outcome.value)}")
    if attempt.end.leftovers:
        yield node("p", f"Left running (now terminated): {'; '.join(attempt.end.leftovers)}", class_="facts")
    logs = [*([("the whole account", text.account(attempt))] if text.has_parts(attempt) else []), *text.logs(attempt)]
    folded = (node("details", node("summary", title), node("pre", words), class_="log") for title, words in logs)
    yield node("div", *folded, class_="logs")


def _took(one: FinishedTest) -> Iterator[ET.Element | str]:
    """The duration of a test, and its outcome unless it passed: colour alone is not enough for every reader."""
    if one.outcome is not TestOutcome.PASSED:
        yield node("span", one.outcome.value, class_="word")
    if one.outcome is not TestOutcome.SKIPPED:
        yield text.duration(one.seconds)


def _key(one: FinishedTest) -> tuple[TestId, int]:
    return one.test.id, one.last.repetition


# -- the timeline


def timeline(history: History, links: dict[tuple[TestId, int], str]) -> ET.Element:
    """An SVG element with a bar for each test on each of its lanes.

    `links` has the address of each test in the page, by test and repetition. Positions on the time axis are
    percentages, so that the timeline fits any width without distorting its text.
    """
    rows = lanes(history)
    length = max([history.summary.seconds, *(span.ended for span in history.spans)], default=0.0) or 1.0
    height = len(rows) * LANE + AXIS
    draw = _Timeline(length, height, history.run.repetitions, links)
    parts = [*draw.axis(), *(part for number, lane in enumerate(rows) for part in draw.lane(lane, number))]
    return node("svg", *parts, class_="timeline", width="100%", height=height, role="group", aria_label="timeline")


@dataclass
class _Timeline:
    """Draws the parts of the timeline, at the scale of the run."""

    length: float
    height: int
    repetitions: int
    links: dict[tuple[TestId, int], str]

    def axis(self) -> Iterator[ET.Element]:
        step = tick(self.length)
        for number in range(int(self.length * 0.97 / step) + 1):  # a label at the very end would be cut off
            x = self._percent(number * step)
            yield node("line", class_="tick", x1=x, x2=x, y1=0, y2=self.height - AXIS + 4)
            yield node("text", _seconds(number * step), class_="axis", x=x, y=self.height - 6)

    def lane(self, lane: Lane, number: int) -> Iterator[ET.Element]:
        y = number * LANE
        yield node("line", class_="lane", x1=0, x2="100%", y1=y + LANE, y2=y + LANE)
        for span in lane.spans:
            yield self._bar(span.began, span.ended, y, "unit")
        for attempt in lane.attempts:
            yield self._test(attempt, y)

    def _test(self, attempt: Attempt, y: float) -> ET.Element:
        bar = self._bar(attempt.began, attempt.began + attempt.seconds, y, f"bar {css(attempt.outcome.value)}")
        took = f"{attempt.outcome.value}, {text.duration(attempt.seconds)} on {text.place(attempt.lease)}"
        bar.append(node("title", f"{text.name(attempt, self.repetitions)}\n{took}"))
        link = self.links.get((attempt.test.id, attempt.repetition))
        return node("a", bar, href=link) if link else bar

    def _bar(self, began: float, ended: float, y: float, class_: str) -> ET.Element:
        width = self._percent(max(0.0, ended - began))
        return node("rect", class_=class_, x=self._percent(began), y=y + (LANE - BAR) / 2, width=width, height=BAR)

    def _percent(self, seconds: float) -> str:
        return f"{seconds / self.length * 100:.4f}%"


def css(outcome: str) -> str:
    """The CSS class of an outcome."""
    return outcome.replace(" ", "-")


def tick(length: float) -> float:
    """A round step (1, 2 or 5 times a power of ten) that gives an axis at most MOST_TICKS labels."""
    steps = (factor * 10.0**exponent for exponent in itertools.count(-3) for factor in (1, 2, 5))
    return next(step for step in steps if length <= step * MOST_TICKS)


def _seconds(value: float) -> str:
    return f"{value:g} s" if value < 120 else f"{value / 60:g} min"
