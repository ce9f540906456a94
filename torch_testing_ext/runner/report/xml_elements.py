"""Elements of XML."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterator

from .wording import printable

Element = ET.Element
Elements = Iterator[Element]


def xml_element(tag: str, *children: ET.Element | str | None, **attributes: object) -> ET.Element:
    """Creates an element whose text is printable. Example: xml_element("p", "1 < 2", class_="x").

    Omits attributes that are None; `class_` stands for class, and `data_x` for data-x.
    """
    element = ET.Element(tag)
    for name, value in attributes.items():
        if value is not None:
            element.set(name.rstrip("_").replace("_", "-"), printable(str(value)))
    for child in children:
        if child is not None:
            _append(element, child)
    return element


def _append(element: ET.Element, child: ET.Element | str) -> None:
    if not isinstance(child, str):
        element.append(child)
        return
    added = printable(child)
    if len(element):
        last = element[-1]
        last.tail = (last.tail or "") + added
    else:
        element.text = (element.text or "") + added
