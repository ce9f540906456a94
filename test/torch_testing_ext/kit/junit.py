"""The schema junit-10 of Jenkins' xUnit plugin, as data, and a check of a report against it.

Written from the schema's documented structure. Elements that it has and that our reports never contain are here, too:
they are what a report may grow into.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import dataclass

# Types of attributes.
STRING = re.compile(r".*", re.DOTALL)
SUREFIRE_TIME = re.compile(r"(([0-9]{0,3},)*[0-9]{3}|[0-9]{0,3})*(\.[0-9]*)?")


@dataclass(frozen=True)
class Content:
    """What an element may contain. `text`: also text, between its children if it has any."""

    children: tuple[str, ...] = ()
    in_order: bool = False  # each at most once, in the order of `children`; otherwise any number in any order
    text: bool = False
    required: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()
    times: frozenset[str] = frozenset()  # attributes with the type SUREFIRE_TIME; all others are strings


def content(
    children: str = "",
    *,
    in_order: bool = False,
    text: bool = False,
    required: str = "",
    optional: str = "",
    times: str = "",
) -> Content:
    return Content(
        tuple(children.split()),
        in_order,
        text,
        frozenset(required.split()),
        frozenset(f"{optional} {times}".split()),
        frozenset(times.split()),
    )


RESULT = content(text=True, optional="type message")
RERUN = content("stackTrace system-out system-err", in_order=True, text=True, required="type", optional="message")
SCHEMA = {
    "testsuites": content("testsuite", optional="name tests failures errors", times="time"),
    "testsuite": content(
        "testsuite properties testcase system-out system-err",
        required="name tests failures errors",
        optional="skipped group timestamp hostname id package file log url version",
        times="time",
    ),
    "properties": content("property"),
    "property": content(required="name value"),
    "testcase": content(
        "skipped error failure rerunFailure rerunError flakyFailure flakyError system-out system-err",
        required="name",
        optional="time classname group",
    ),
    **dict.fromkeys(("skipped", "error", "failure"), RESULT),
    **dict.fromkeys(("rerunFailure", "rerunError", "flakyFailure", "flakyError"), RERUN),
    **dict.fromkeys(("stackTrace", "system-out", "system-err"), content(text=True)),
}


class Invalid(AssertionError):
    """A report that the schema does not allow."""


def validate(root: ET.Element) -> None:
    """Raises Invalid with the first violation of the schema."""
    if root.tag not in ("testsuites", "testsuite"):
        raise Invalid(f"{root.tag} is not the root of a report")
    for element in root.iter():
        _validate(element)


def _validate(element: ET.Element) -> None:
    tag, may = element.tag, SCHEMA[element.tag]
    for child in element:
        if child.tag not in may.children:
            raise Invalid(f"{tag} must not contain {child.tag}")
    if may.in_order:
        places = [may.children.index(child.tag) for child in element]
        if places != sorted(set(places)):
            raise Invalid(f"{tag} contains {[child.tag for child in element]}")
    texts = [element.text, *(child.tail for child in element)]
    if not may.text and any(text and text.strip() for text in texts):
        raise Invalid(f"{tag} contains text")
    if missing := may.required - set(element.keys()):
        raise Invalid(f"{tag} lacks {missing}")
    if unknown := set(element.keys()) - may.required - may.optional:
        raise Invalid(f"{tag} must not have {unknown}")
    for name, value in element.items():
        if not (SUREFIRE_TIME if name in may.times else STRING).fullmatch(value):
            raise Invalid(f"{tag} has {name}={value!r}")


def read_junit(report: str) -> ET.Element:
    """Parses a report and checks it: the schema, and that counts, times and names fit what the report contains."""
    root = ET.fromstring(report.encode("utf-8"))
    validate(root)
    for suite in root:
        _check_counts(suite)
    for name in "tests", "failures", "errors":
        assert int(root.get(name)) == sum(int(suite.get(name)) for suite in root), name
    names = Counter((case.get("classname"), case.get("name")) for case in root.iter("testcase"))
    assert all(number == 1 for number in names.values()), names.most_common(3)
    return root


def _check_counts(suite: ET.Element) -> None:
    cases = suite.findall("testcase")
    found = {"tests": len(cases)}
    for count, tag in ("failures", "failure"), ("errors", "error"), ("skipped", "skipped"):
        found[count] = sum(case.find(tag) is not None for case in cases)
    said = {name: int(suite.get(name)) for name in found}
    assert said == found, f"{suite.get('name')} says {said}, but contains {found}"
    for case in cases:
        assert len([child for child in case if child.tag in ("failure", "error", "skipped")]) <= 1, case.get("name")
        assert re.fullmatch(r"\d+\.\d{3}", case.get("time")), case.get("time")
    assert abs(float(suite.get("time")) - sum(float(case.get("time")) for case in cases)) < 0.001 * (len(cases) + 1)
