"""The timeline as an SVG element with a bar for each test on each of its lanes. Pure.

Positions on the time axis are percentages, so that the timeline fits any width without distorting its text.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterator

from ..model import Attempt, TestId
from . import text
from .history import History, Lane, lanes
from .tree import node

LANE, BAR, AXIS = 22, 14, 24  # heights in pixels
MOST_TICKS = 8


def timeline(history: History, links: dict[tuple[TestId, int], str]) -> ET.Element:
    """`links` has the address of each test in the page, by test and repetition."""
    rows = lanes(history)
    length = max([history.summary.seconds, *(span.ended for span in history.spans)], default=0.0) or 1.0
    height = len(rows) * LANE + AXIS
    draw = _Drawing(length, height, history.run.repetitions, links)
    parts = [*draw.axis(), *(part for number, lane in enumerate(rows) for part in draw.lane(lane, number))]
    return node("svg", *parts, class_="timeline", width="100%", height=height, role="group", aria_label="timeline")


def names(history: History) -> list[str]:
    """The names of the lanes, for a column next to the timeline that stays visible when the timeline scrolls."""
    return [lane.name for lane in lanes(history)]


class _Drawing:
    """Draws the parts of the timeline, at the scale of the run."""

    def __init__(self, length: float, height: int, repetitions: int, links: dict[tuple[TestId, int], str]):
        self._length = length
        self._height = height
        self._repetitions = repetitions
        self._links = links

    def axis(self) -> Iterator[ET.Element]:
        step = tick(self._length)
        for number in range(int(self._length * 0.97 / step) + 1):  # a label at the very end would be cut off
            x = self._percent(number * step)
            yield node("line", class_="tick", x1=x, x2=x, y1=0, y2=self._height - AXIS + 4)
            yield node("text", _seconds(number * step), class_="axis", x=x, y=self._height - 6)

    def lane(self, lane: Lane, number: int) -> Iterator[ET.Element]:
        y = number * LANE
        yield node("line", class_="lane", x1=0, x2="100%", y1=y + LANE, y2=y + LANE)
        for span in lane.spans:
            yield self._bar(span.began, span.ended, y, "unit")
        for attempt in lane.attempts:
            yield self._test(attempt, y)

    def _test(self, attempt: Attempt, y: float) -> ET.Element:
        bar = self._bar(attempt.began, attempt.began + attempt.seconds, y, f"bar {css(attempt.outcome.value)}")
        bar.append(node("title", self._caption(attempt)))
        link = self._links.get((attempt.test.id, attempt.repetition))
        return node("a", bar, href=link) if link else bar

    def _caption(self, attempt: Attempt) -> str:
        took = f"{attempt.outcome.value}, {text.duration(attempt.seconds)} on {text.place(attempt.lease)}"
        return f"{text.name(attempt, self._repetitions)}\n{took}"

    def _bar(self, began: float, ended: float, y: float, class_: str) -> ET.Element:
        width = self._percent(max(0.0, ended - began))
        return node("rect", class_=class_, x=self._percent(began), y=y + (LANE - BAR) / 2, width=width, height=BAR)

    def _percent(self, seconds: float) -> str:
        return f"{seconds / self._length * 100:.4f}%"


def css(outcome: str) -> str:
    """The CSS class of an outcome."""
    return outcome.replace(" ", "-")


def tick(length: float) -> float:
    """A round step (1, 2 or 5 times a power of ten) that gives an axis at most MOST_TICKS labels."""
    step = 1e-3
    while True:
        for factor in 1, 2, 5:
            if length <= step * factor * MOST_TICKS:
                return step * factor
        step *= 10


def _seconds(value: float) -> str:
    return f"{value:g} s" if value < 120 else f"{value / 60:g} min"
