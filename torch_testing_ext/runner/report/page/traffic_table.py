"""The traffic of a whole world, as a table: who sends how much to whom."""

from __future__ import annotations

from torch_testing_ext._collectives.worlds.world_views import WorldView
from torch_testing_ext.runner.report.xml_elements import Element, Elements, xml_element


def render_world(view: WorldView) -> Elements:
    """The facts about a world, the lines that were not judged, and the matrix of its traffic."""
    yield xml_element("p", view.in_words, class_="facts")
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
