"""What the part `newest` of `.ci/run` has found: which assumptions about torch no longer hold.

    python3 .ci/broken_contracts.py build/ci

reads the JUnit XML of that part. `newest.row` gets a row for the table of docs/help/compatibility.md, and `newest.md`
what is broken, in words for an issue; that file is there only if something is.
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple

# The tests whose failures name an assumption and what depends on it.
CONTRACTS = "test_contracts"
LONGEST = 400


class Failed(NamedTuple):
    """A test that failed, and the first line of its message."""

    name: str
    message: str
    is_contract: bool


def failed_in(report: ET.Element) -> Iterator[Failed]:
    """The tests of a report that failed."""
    for case in report.iter("testcase"):
        for failure in (*case.iter("failure"), *case.iter("error")):
            name = f"{case.get('classname')}.{case.get('name')}"
            message = re.sub(r"^[\w.]+: ", "", failure.get("message") or "").partition("\n")[0]
            yield Failed(name, message[:LONGEST], CONTRACTS in str(case.get("classname")))


def contracts_in(report: ET.Element) -> int:
    """How many assumptions a report has tried."""
    tried = [case for case in report.iter("testcase") if case.find("skipped") is None]
    return sum(CONTRACTS in str(case.get("classname")) for case in tried)


def row(version: str, day: date, failed: Sequence[Failed], contracts: int) -> str:
    """A row of the table in docs/help/compatibility.md. `contracts`: how many were tried."""
    broken = [test.name.rpartition(".")[2] for test in failed if test.is_contract]
    others = len(failed) - len(broken)
    words = f"broken: {', '.join(broken)}" if broken else "all hold" if contracts else "none was tried"
    python = ".".join(map(str, sys.version_info[:2]))
    tests = f"; of the suites and planted faults, {others} fail" if others else ""
    return f"| {version} | {python} | {words}, {day}{tests} |"


def issue(version: str, failed: Sequence[Failed]) -> str:
    """The text of an issue about what is broken."""
    lines = [f"`bash .ci/run newest` with torch {version}:", ""]
    for title, is_contract in (("Broken contracts", True), ("Other tests that fail", False)):
        found = [test for test in failed if test.is_contract is is_contract]
        if found:
            lines += [f"## {title}", "", *(f"- `{test.name}`: {test.message}" for test in found), ""]
    return "\n".join(lines)


def main(words: Sequence[str]) -> None:
    """Write both files beside the report."""
    folder = Path(words[0])
    wanted, text = folder / "newest.md", folder / "newest.row"
    wanted.unlink(missing_ok=True)
    log = (folder / "newest.log").read_text(encoding="utf-8") if (folder / "newest.log").exists() else ""
    told = re.search(r"^torch (\S+)$", log, re.MULTILINE)
    version = told[1] if told else "unknown"
    if not (folder / "newest.xml").exists():
        text.write_text(f"| {version} | | no test ran, {date.today()} |\n", encoding="utf-8")
        wanted.write_text(f"No test ran with torch {version}; see the log.\n", encoding="utf-8")
        return
    report = ET.parse(folder / "newest.xml").getroot()
    failed, contracts = [*failed_in(report)], contracts_in(report)
    text.write_text(row(version, date.today(), failed, contracts) + "\n", encoding="utf-8")
    print(text.read_text(encoding="utf-8"), end="")
    if failed or not contracts:
        wanted.write_text(issue(version, failed), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
