"""Prints the failures of CI's parts again, in few lines: `.ci/run` calls it at its end.

    python3 .ci/failures.py build/ci test full

prints for each of these parts the names of its failed tests and the end of each failure, from the JUnit XML of that
part; of a part without a failed test, such as lint, the end of its log. So the end of a long output shows the failures
of all parts. `python3 .ci/failures.py build/ci --names test` prints the names alone.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
# Characters of all that is printed, about: a third at most for names.
LIMIT = 6000
NAMES_LIMIT = 2000
LINES = 25
LINE_WIDTH = 200
# With fewer characters, the end of a failure says nothing.
LEAST = 300


class Failure(NamedTuple):
    """A failed test, or a part that failed without one."""

    title: str
    text: str


def test_name(classname: str, name: str) -> str:
    """The id that pytest takes, as far as the names of a JUnit XML say which file it is."""
    words = classname.split(".") if classname else []
    for number in range(len(words), 0, -1):
        path = "/".join(words[:number]) + ".py"
        # Those of run_test.py are paths below `test`.
        for file in (path, f"test/{path}"):
            if (ROOT / file).is_file():
                return "::".join([file, *words[number:], name])
    return ".".join([*words, name])


def failed_tests(file: Path) -> list[Failure]:
    """The failed tests of a JUnit XML; none if there is no such file, or only a part of it."""
    try:
        root = ET.parse(file).getroot()
    except (OSError, ET.ParseError):
        return []
    failures = []
    for case in root.iter("testcase"):
        elements = [element for element in case if element.tag in ("failure", "error")]
        if elements:
            texts = [element.text or element.get("message", "") for element in elements]
            name = test_name(case.get("classname", ""), case.get("name", ""))
            failures.append(Failure(name, "\n".join(texts)))
    return failures


def end_of(text: str, limit: int) -> list[str]:
    """The last lines of a text, as many as the limits allow, at least one."""
    lines: list[str] = []
    for line in reversed(text.rstrip().splitlines()[-LINES:]):
        line = line.rstrip()[:LINE_WIDTH]
        limit -= len(line) + 1
        if lines and limit < 0:
            break
        lines.insert(0, line)
    return lines


def names_of(failures: Sequence[Failure], limit: int) -> Iterator[str]:
    for number, failure in enumerate(failures):
        line = f"  {failure.title[:LINE_WIDTH]}"
        limit -= len(line) + 1
        if number and limit < 0:
            yield f"  and {len(failures) - number} more"
            return
        yield line


def describe(results: Path, parts: Sequence[str]) -> list[str]:
    """The lines about all failed parts. Failures share the limit evenly; what a short one leaves is for the others."""
    lines: list[str] = []
    failures: list[Failure] = []
    for part in parts:
        tests = failed_tests(results / f"{part}.xml")
        if tests:
            lines.append(f"+ [{part}] {len(tests)} failed:")
            lines += names_of(tests, NAMES_LIMIT // len(parts))
            failures += [Failure(f"+ [{part}] the end of {test.title}:", test.text) for test in tests]
        else:
            log = results / f"{part}.log"
            text = log.read_text(errors="replace") if log.exists() else ""
            failures.append(Failure(f"+ [{part}] failed without a failed test; the end of its log:", text))
    left = LIMIT - sum(len(line) + 1 for line in lines)
    for number, failure in enumerate(failures):
        if left < LEAST:
            lines.append(f"+ {len(failures) - number} more: see {results}")
            break
        # Some whole ends are worth more than a line of each.
        share = max(LEAST, left // (len(failures) - number))
        ending = [failure.title[:LINE_WIDTH], *end_of(failure.text, share - len(failure.title) - 1)]
        left -= sum(len(line) + 1 for line in ending)
        lines += ending
    return lines


def main(folder: str, *words: str) -> None:
    results = Path(folder)
    if words[0] == "--names":
        print("\n".join(test.title for part in words[1:] for test in failed_tests(results / f"{part}.xml")))
    else:
        print("\n".join(describe(results, words)))


if __name__ == "__main__":
    main(*sys.argv[1:])
