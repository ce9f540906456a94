"""Whole worlds in reports: their traffic, and a lane for each class of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch_testing_ext._collectives.worlds.world_views import WorldCall, WorldClass, WorldView
from torch_testing_ext._process.words import list_of
from torch_testing_ext.runner.model import Attempt, TestEnd

from .section import Section, TraceProcess, TraceSlice

if TYPE_CHECKING:
    from .xml_elements import Element, Elements

# The length of a call in a trace, in seconds: time is not simulated.
_STEP = 1e-3
_SCALES = ((1, "bytes"), (1 << 10, "KiB"), (1 << 20, "MiB"), (1 << 30, "GiB"), (1 << 40, "TiB"))


class WorldSection(Section[WorldView]):
    """Each world that a test has run in, or has checked."""

    kind = WorldView

    def in_junit(self, result: WorldView) -> list[str]:
        return [result.in_words]

    def in_json_of_attempt(self, end: TestEnd) -> dict[str, Any]:
        return {"worlds": [asdict(view) for view in end.worlds]}

    def in_trace(self, attempt: Attempt, result: WorldView) -> Iterator[TraceProcess]:
        if any(alike.calls for alike in result.classes):
            name = f"whole world of {result.size} ranks, {_STEP * 1e3:g} ms for each call, not its time"
            lanes = [(list_of(alike.ranks), _slices(alike, attempt.began)) for alike in result.classes]
            yield TraceProcess(f"{name}: {attempt.test.id.dotted}", lanes)

    def in_page_of_attempt(self, result: WorldView) -> Elements:
        """The facts about a world, the lines that were not judged, and the matrix of its traffic."""
        from .xml_elements import xml_element

        yield xml_element("p", result.in_words, class_="facts")
        if result.not_judged:
            lines = [xml_element("li", line) for line in result.not_judged]
            words = "not judged, since values were not communicated:"
            yield xml_element("div", words, xml_element("ul", *lines), class_="facts")
        most = max(map(max, result.traffic), default=0)
        if most:
            yield _traffic(result, most)


def _slices(alike: WorldClass, began: float) -> list[TraceSlice]:
    """The calls of a class of ranks, one after the other."""

    def slice_of(step: int, call: WorldCall) -> TraceSlice:
        at = began + step * _STEP
        facts = {"group": call.group, "bytes": call.bytes, "line": call.site, "ranks": len(alike.ranks)}
        return call.name, "call", at, at + _STEP, facts

    return [slice_of(step, call) for step, call in enumerate(alike.calls)]


def _traffic(view: WorldView, most: int) -> Element:
    """The bytes from block to block of ranks as a table; `most` is the largest number."""
    from .xml_elements import xml_element

    def amount(sent: int) -> Element:
        """A cell, which is the darker the more is sent; nothing is an empty one."""
        if not sent:
            return xml_element("td")
        style = f"--share: {sent / most * 35:.0f}%"
        return xml_element("td", f"{sent / unit:.3g}", style=style, title=f"{sent} bytes")

    blocks = [view.block_of(number) for number in range(len(view.traffic))]
    names = [str(block[0]) if len(block) == 1 else f"{block[0]}-{block[-1]}" for block in blocks]
    unit, word = max((scale for scale in _SCALES if scale[0] <= most), default=_SCALES[0])
    caption = f"{word} that the ranks of a row send to those of a column"
    rows = [xml_element("tr", xml_element("td"), *(xml_element("th", name, scope="col") for name in names))]
    for name, row in zip(names, view.traffic, strict=True):
        rows.append(xml_element("tr", xml_element("th", name, scope="row"), *map(amount, row)))
    table = xml_element("table", xml_element("caption", caption), *rows, class_="traffic")
    return xml_element("div", table, class_="scroll", tabindex="0", role="region", aria_label=caption)
