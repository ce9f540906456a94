"""The format of JUnit reports as Maven's Surefire defines it: elements, their order, their attributes."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """What an element may contain."""

    children: str = ""  # a regular expression for the sequence of children, each as `<tag>`
    required: frozenset[str] = frozenset()
    allowed: frozenset[str] = frozenset()
    text: bool = False


def shape(children: str = "", required: str = "", allowed: str = "", text: bool = False) -> Shape:
    return Shape(children.replace(" ", ""), frozenset(required.split()), frozenset(allowed.split()), text)


COUNTS = "name tests errors skipped failures"
RERUN = shape("<stackTrace>(<system-out>)?", "type", "message")
SHAPES = {
    "testsuites": shape("(<testsuite>)*", COUNTS, "time"),
    "testsuite": shape("(<testcase>)*", COUNTS, "time timestamp"),
    "testcase": shape(
        "(<failure>)* (<rerunFailure>)* (<flakyFailure>)* (<skipped>)? (<error>)? (<rerunError>)* (<flakyError>)*"
        "(<system-out>)?",
        "name time",
        "classname file line",
    ),
    "failure": shape("", "type", "message", text=True),
    "error": shape("", "type", "message", text=True),
    "skipped": shape("", "", "message", text=True),
    **dict.fromkeys(("rerunFailure", "flakyFailure", "rerunError", "flakyError"), RERUN),
    "stackTrace": shape(text=True),
    "system-out": shape(text=True),
}
TIME = re.compile(r"\d+\.\d{3}")


def read_junit(report: str) -> ET.Element:
    """Parses a report and checks its format; an AssertionError says what is wrong."""
    root = ET.fromstring(report.encode("utf-8"))
    assert root.tag == "testsuites", root.tag
    for element in root.iter():
        _check(element)
    return root


def _check(element: ET.Element) -> None:
    must = SHAPES[element.tag]
    children = "".join(f"<{child.tag}>" for child in element)
    assert re.fullmatch(must.children, children), f"{element.tag} has {children}"
    names = set(element.keys())
    assert must.required <= names <= must.required | must.allowed, f"{element.tag} has {names}"
    assert must.text or not (element.text or "").strip(), f"{element.tag} has text"
    assert TIME.fullmatch(element.get("time", "0.000")), element.get("time")
