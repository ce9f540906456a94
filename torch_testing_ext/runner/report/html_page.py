"""The run as one HTML file, which refers to nothing outside it and is complete without JavaScript. Pure."""

from __future__ import annotations

import itertools
import shlex
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from string import Template

from torch_testing_ext._process import user_commands
from torch_testing_ext.launch.folding import without_accidents

from ..model import Attempt, Category, FinishedTest, Summary, TestId, TestOutcome
from . import brief, text
from .failure_view import failure
from .history import History, Lane, lanes
from .text import node

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
    parts = _body(history, command or user_commands.runner())
    body = "\n".join(ET.tostring(part, encoding="unicode", method="html") for part in parts)
    asset = {kind: (HERE / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js")}
    title = f"{headline(history.summary)}: {user_commands.runner_name()}"
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
        groups = [group for group in brief.by_cause(self._summary.failures, self._summary.policy) if len(group) > 1]
        rows = []
        for group in groups:
            links = [
                node("a", one.test.id.dotted or one.test.id.file, href=f"#{self._anchors[_key(one)]}") for one in group
            ]
            names = node("span", *(part for link in links for part in (link, " ")), class_="facts")
            cause = text.reason(brief.failing_attempts(group[0], self._summary.policy)[-1])
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
        parts += [text.not_enough_devices(one.last.want)] if one.last.want else []
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
    if attempt.leftovers:
        yield node("p", f"Left running (now terminated): {'; '.join(attempt.leftovers)}", class_="facts")
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
