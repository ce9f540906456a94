"""The picture of ranks that wait for each other: an arrow leads from each to those that it waits for."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch_testing_ext._collectives.failure import (
    RankWait,
)
from torch_testing_ext._process.words import grouped, list_of
from torch_testing_ext.runner.report.xml_elements import Element, Elements, xml_element

# A place in a picture: x and y.
Point = tuple[float, float]

# Sizes in pixels.
WIDTH_OF_GRAPH = 860
BOX = 24
RADIUS = 130
# The distance by which an arrow bends away from the middle, as a part of its length.
_CURVE = 0.3


def wait_graph(waits: Sequence[RankWait]) -> Elements:
    """The picture of waits; nothing if there are none."""
    if not waits:
        return
    waits = _merged(waits)
    boxes = _boxes(waits)
    height = 120 + 40 * len(boxes)
    places = _around(list(boxes), height)
    arrows = _arrows(waits, boxes)
    parts: list[Element] = []
    for (name, other), words in arrows.items():
        returns = (other, name) in arrows
        parts += _arrow(words, places[name], places[other], 0 if returns else height / 2)
    parts += [_box(name, place) for name, place in places.items()]
    view = f"0 0 {WIDTH_OF_GRAPH} {height}"
    label = "ranks that wait for each other"
    yield xml_element(
        "svg", *parts, viewBox=view, width=WIDTH_OF_GRAPH, class_="wait-graph", role="img", aria_label=label
    )


def _merged(waits: Sequence[RankWait]) -> list[RankWait]:
    """Ranks that wait in the same call for the same ranks, as one."""
    alike = grouped(((wait.call, wait.site, wait.missing), wait) for wait in waits)
    merged = []
    for of_call in alike.values():
        ranks = sorted({rank for wait in of_call for rank in wait.ranks})
        merged.append(replace(of_call[0], ranks=tuple(ranks)))
    return merged


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
        place = f"{os.path.basename(wait.site.file)}:{wait.site.line}" if wait.site else ""
        words = ", ".join(filter(None, (wait.call, place)))
        for other, ranks in boxes.items():
            if other != name and not ranks.isdisjoint(wait.missing):
                arrows[name, other] = words
    return arrows


def _around(names: list[str], height: int) -> dict[str, Point]:
    """A place for each box, on an ellipse."""
    x, y = WIDTH_OF_GRAPH / 2, height / 2
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
    outwards = across_x * (middle_x - WIDTH_OF_GRAPH / 2) + across_y * (middle_y - centre)
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
    if abs(x - WIDTH_OF_GRAPH / 2) < BOX:
        side = "middle"
        y += 16 if y > middle else -8
    elif x > WIDTH_OF_GRAPH / 2:
        side = "start"
        x += 8
        y += 4
    else:
        side = "end"
        x -= 8
        y += 4
    return xml_element("text", words, x=f"{x:.0f}", y=f"{y:.0f}", text_anchor=side)
