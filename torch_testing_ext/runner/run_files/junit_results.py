"""RunResults in JUnit XML of any runner: pytest, pytest-xdist, unittest-xml-reporting, PyTorch's, gtest, Surefire.

A file comes from a stranger. pyexpat, with no handler of its own for entities, is told to stop at the first document
type: there is nothing to expand, which is all that defusedxml adds. junitparser would build the whole tree first.
"""

from __future__ import annotations

import math
import re
import xml.parsers.expat
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.runner.model import TestId

from .results import NOT_RUN_BY_PYTEST, RunResults, TestResult
from .run_file import BadResults

LARGEST = 256 * 1024 * 1024
DEEPEST = 50
_PIECE = 1 << 16
# Where pytest skipped: the first line of the text of a `skipped`, and the text for a module.
_PLACE = re.compile(r"^(\S.*?\.py):(\d+): ")
_OF_MODULE = re.compile(r"""^\('(.*?\.py)', (\d+), ["'](?:[\w.]+: )?(.*)["']\)$""", re.DOTALL)
# The first line of gtest's messages.
_PLACE_ALONE = re.compile(r"^\S+:\d+\n")
_NUMBER = re.compile(r" #\d+$")
# unittest's name of a subtest, and of a class or module whose tests cannot begin.
_SUBTEST = re.compile(r"^([^\W\d]\w*) [(\[].*[)\]]$", re.DOTALL)
_SETUP = re.compile(r"^(setUpClass|setUpModule) \((.+)\)$")
_UNITTESTS_FILE = re.compile(r"^unittest\.loader\.(?:_FailedTest|ModuleSkipped)\.?")


def read_junit(path: Path) -> RunResults:
    """The results of a JUnit file. Raises BadResults."""
    reader = _Reader()
    parser = xml.parsers.expat.ParserCreate()
    parser.buffer_text = True
    parser.StartElementHandler = reader.start
    parser.EndElementHandler = reader.end
    parser.CharacterDataHandler = reader.text
    parser.StartDoctypeDeclHandler = _refuse_doctype
    parser.EntityDeclHandler = _refuse_doctype
    try:
        with path.open("rb") as file:
            size = 0
            while piece := file.read(_PIECE):
                size += len(piece)
                if size > LARGEST:
                    raise BadResults(f"{path} is larger than {LARGEST // 2**20} MiB")
                parser.Parse(piece, False)
            parser.Parse(b"", True)
    except OSError as error:
        raise BadResults(f"{path}: {error.strerror}") from None
    except (xml.parsers.expat.ExpatError, LookupError, ValueError) as error:
        # The last two are of its encoding.
        raise BadResults(f"{path} is neither a run file nor JUnit XML: {error}") from None
    except _Refused as error:
        raise BadResults(f"{path} {error}") from None
    if not reader.is_junit:
        raise BadResults(f"{path} is XML, but not of JUnit: it has no testsuite")
    return RunResults(str(path), tuple(reader.results), reader.host, reader.clock, is_foreign=True)


class _Refused(Exception):
    """A document that no runner writes."""


def _refuse_doctype(*declaration: object) -> None:
    raise _Refused("declares a document type or entities, which no JUnit file has")


@dataclass
class _Case:
    """A test case, while it is read."""

    attributes: dict[str, str]
    suite: dict[str, str]
    # The elements in it, with their attributes and texts.
    parts: list[tuple[str, dict[str, str], list[str]]] = field(default_factory=list)


@dataclass
class _Reader:
    """Collects test cases as the parser meets them, with no tree of the whole."""

    results: list[TestResult] = field(default_factory=list)
    is_junit: bool = False
    host: str = ""
    clock: float = 0.0
    _suites: list[dict[str, str]] = field(default_factory=list)
    _case: _Case | None = None
    _depth: int = 0

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        self._depth += 1
        if self._depth > DEEPEST:
            raise _Refused(f"is nested deeper than {DEEPEST} elements")
        tag = tag.rpartition("}")[2]
        if tag in ("testsuite", "testsuites"):
            self.is_junit = True
            self._suites.append(attributes)
            self.host = self.host or attributes.get("hostname", "")
            self._began(attributes.get("timestamp", ""))
        elif tag == "testcase":
            self._case = _Case(attributes, self._suites[-1] if self._suites else {})
        elif self._case is not None:
            self._case.parts.append((tag, attributes, []))

    def text(self, text: str) -> None:
        if self._case is not None and self._case.parts:
            kept = self._case.parts[-1][2]
            # The first line is all that is needed of it.
            if sum(map(len, kept)) < 10_000:
                kept.append(text)

    def end(self, tag: str) -> None:
        self._depth -= 1
        tag = tag.rpartition("}")[2]
        if tag in ("testsuite", "testsuites") and self._suites:
            self._suites.pop()
        elif tag == "testcase" and self._case is not None:
            self.results.append(_result(self._case))
            self._case = None

    def _began(self, timestamp: str) -> None:
        with suppress(ValueError):
            moment = datetime.fromisoformat(timestamp.replace("Z", "+00:00"))
            if moment.tzinfo is None:
                moment = moment.replace(tzinfo=timezone.utc)
            self.clock = min(self.clock or math.inf, moment.timestamp())


def _test(case: _Case) -> TestId:
    """The test of a case; one without a method stands for all tests of its class, one without a class for its file."""
    suite_file = case.suite.get("file", "")
    file = case.attributes.get("file") or (suite_file if suite_file.endswith(".py") else "")
    file, cls = file.replace("\\", "/"), case.attributes.get("classname", "")
    name = _NUMBER.sub("", case.attributes.get("name", ""))
    if of_file := _UNITTESTS_FILE.match(cls):
        return TestId("", cls[of_file.end() :], name)
    if setup := _SETUP.match(name):
        return TestId(file, setup[2]) if setup[1] == "setUpClass" else TestId("", "", setup[2])
    if subtest := _SUBTEST.match(name):
        name = subtest[1]
    return TestId(file, cls, name)


def _result(case: _Case) -> TestResult:
    attributes = case.attributes
    test = _test(case)
    try:
        # Surefire separates thousands.
        seconds = float(attributes.get("time", "0").replace(",", ""))
    except ValueError:
        seconds = 0.0
    outcome, message, skipped_at, not_judged = TestOutcome.PASSED, "", "", ""
    by_tag = {tag: (of_part, "".join(text)) for tag, of_part, text in reversed(case.parts)}
    if failed := by_tag.get("error") or by_tag.get("failure"):
        # Bazel has no class: the case is a whole program, which ran.
        is_error = "error" in by_tag and "classname" in attributes
        outcome = TestOutcome.ERROR if is_error else TestOutcome.FAILED
        message = failed[0].get("message") or failed[1]
        if not test.method or "import" in message.lower() or message == "collection failure":
            # Of a file: its last line says why.
            message = (failed[1] or message).strip().rpartition("\n")[2].removeprefix("E ").strip()
    elif skipped := by_tag.get("skipped"):
        outcome, message = TestOutcome.SKIPPED, skipped[0].get("message") or skipped[1]
        said = skipped[1].strip()
        if place := _PLACE.match(said) or _OF_MODULE.match(said):
            skipped_at = f"{place[1]}:{place[2]}"
            message = place[3] if place.re is _OF_MODULE else message
        if skipped[0].get("type") == "pytest.xfail":
            outcome = TestOutcome.EXPECTED_FAILURE
            not_judged = "xfail(run=False)" if NOT_RUN_BY_PYTEST in message else ""
    elif attributes.get("status") in ("notrun", "disabled") or attributes.get("result") in ("suppressed", "skipped"):
        # gtest
        outcome, message = TestOutcome.SKIPPED, attributes.get("status", "") or attributes["result"]
    elif again := by_tag.get("flakyFailure") or by_tag.get("flakyError") or by_tag.get("rerun"):
        outcome, message = TestOutcome.FLAKY, again[0].get("message", "")
    line = attributes.get("line", "")
    return TestResult(
        test,
        outcome,
        outcome.counts_as,
        seconds if math.isfinite(seconds) else 0.0,
        _PLACE_ALONE.sub("", message.strip()).partition("\n")[0],
        int(line) if line.isascii() and line.isdigit() and len(line) < 9 else 0,
        skipped_at,
        not_judged=not_judged,
    )
