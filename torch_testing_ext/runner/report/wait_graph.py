"""The picture of ranks that wait for each other: an arrow leads from each to those that it waits for. Pure."""

from __future__ import annotations

import math
import os
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence

from torch_testing_ext._collectives.failure import RankWait
from torch_testing_ext._process.words import list_of

from .text import node

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
