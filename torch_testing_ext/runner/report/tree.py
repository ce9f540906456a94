"""Creates XML and HTML elements whose text is printable. Example: node("p", "1 < 2", class_="x")."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from .text import printable


def node(tag: str, *children: ET.Element | str | None, **attributes: object) -> ET.Element:
    """Creates an element. Omits attributes that are None; `class_` stands for class, and `data_x` for data-x."""
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
    elif len(element):
        element[-1].tail = (element[-1].tail or "") + printable(child)
    else:
        element.text = (element.text or "") + printable(child)
