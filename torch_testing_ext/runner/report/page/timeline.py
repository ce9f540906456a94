"""The timeline of the page: what ran when on which device and slot."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from torch_testing_ext.runner.model import Attempt, Span, TestId
from torch_testing_ext.runner.report.lanes_of_run import Lane, all_lanes
from torch_testing_ext.runner.report.recorder import History
from torch_testing_ext.runner.report.xml_elements import Element, Elements, xml_element

# A test, its repetition, and the machine: of a merged run, several may have run the same test.
TestKey = tuple[TestId, int, str]


def key_of(attempt: Attempt) -> TestKey:
    return attempt.test.id, attempt.repetition, attempt.lease.node


# Heights in the timeline, in pixels; page.css has that of bars, too.
LANE = 22
BAR_HEIGHT = 14
_ABOVE_BAR = (LANE - BAR_HEIGHT) // 2
AXIS = 24
MOST_TICKS = 8
# Steps of the time axis that units begin and end at.
WIDTH = 1_000_000


def render_timeline(history: History, links: dict[TestKey, str]) -> Element:
    """An SVG element with a bar for each test on each of its lanes.

    `links` has the address of each test in the page. Positions on the time axis are
    percentages, so that the timeline fits any width without distorting its text. page.js names the bars.
    """
    rows = all_lanes(history)
    length = max([history.summary.seconds, *(span.ended for span in history.spans)], default=0.0) or 1.0
    height = len(rows) * LANE + AXIS
    draw = _Timeline(length, height, links)
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
        if lane.spans:
            yield self._units(lane.spans, y)
        for attempt in lane.attempts:
            yield self._bar(attempt, y)

    def _units(self, spans: Sequence[Span], y: int) -> Element:
        """The times in which a lane was leased, as one path, which is stretched: it has no percentages."""
        moments = [(round(span.began / self.length * WIDTH), round(span.ended / self.length * WIDTH)) for span in spans]
        path = xml_element("path", d="".join(f"M{began} 0V1H{ended}V0z" for began, ended in moments))
        box = {"y": y + _ABOVE_BAR, "width": "100%", "height": BAR_HEIGHT, "viewBox": f"0 0 {WIDTH} 1"}
        return xml_element("svg", path, class_="unit", preserveAspectRatio="none", **box)

    def _bar(self, attempt: Attempt, y: int) -> Element:
        x, width = self._percent(attempt.began), self._percent(attempt.seconds)
        kind = f"bar {css_class(attempt.outcome.value)}"
        bar = xml_element("rect", class_=kind, x=x, y=y + _ABOVE_BAR, width=width)
        link = self.links.get(key_of(attempt))
        return xml_element("a", bar, href=link) if link else bar

    def _percent(self, seconds: float) -> str:
        return f"{seconds / self.length * 100:.4g}%"


def css_class(outcome: str) -> str:
    """The CSS class of an outcome."""
    return outcome.replace(" ", "-")


def tick_step(length: float) -> float:
    """A round step (1, 2 or 5 times a power of ten) that gives an axis at most MOST_TICKS labels."""
    steps = (factor * 10.0**exponent for exponent in itertools.count(-3) for factor in (1, 2, 5))
    return next(step for step in steps if length <= step * MOST_TICKS)


def _seconds(value: float) -> str:
    return f"{value:g} s" if value < 120 else f"{value / 60:g} min"
