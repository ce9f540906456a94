"""The timeline of the page: what ran when on which device and slot."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from torch_testing_ext.runner.model import Attempt, FinishedTest, TestId
from torch_testing_ext.runner.report import wording
from torch_testing_ext.runner.report.recorder import History, Lane, all_lanes
from torch_testing_ext.runner.report.xml_elements import Element, Elements, xml_element

# A test and its repetition.
TestKey = tuple[TestId, int]


def key_of_test(finished: FinishedTest) -> TestKey:
    return finished.test.id, finished.last.repetition


# Heights in the timeline, in pixels.
LANE = 22
BAR_HEIGHT = 14
AXIS = 24
MOST_TICKS = 8


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
        took = f"{attempt.outcome.value}, {wording.duration(attempt.seconds)} on {wording.place(attempt.lease)}"
        bar.append(xml_element("title", f"{wording.name(attempt, self.repetitions)}\n{took}"))
        link = self.links.get((attempt.test.id, attempt.repetition))
        return xml_element("a", bar, href=link) if link else bar

    def _bar(self, began: float, ended: float, y: float, class_: str) -> Element:
        x = self._percent(began)
        width = self._percent(max(0.0, ended - began))
        return xml_element("rect", class_=class_, x=x, y=y + (LANE - BAR_HEIGHT) / 2, width=width, height=BAR_HEIGHT)

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
