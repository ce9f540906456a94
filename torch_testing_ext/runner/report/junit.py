"""The run as JUnit XML, valid by the schema junit-10 of Jenkins' xUnit plugin. Pure.

A test that failed in all attempts has `failure` (or `error`) for the first and `rerunFailure` for the others; a test
that finally passed has a `flakyFailure` for each failed attempt. The order of these elements is that of Maven's
Surefire, whose format it is. The schema has no place for a test's line; the JSON report has it.
"""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone

from ..model import Attempt, Category, FinishedTest, Policy, Summary, Test, TestOutcome
from . import text
from .history import History
from .text import node

# Outcomes that are a `failure` in JUnit XML; all others that do not pass are an `error`.
FAILURES = (TestOutcome.FAILED, TestOutcome.UNEXPECTED_SUCCESS, TestOutcome.FLAKY, TestOutcome.LEAKED)
ORDER = ("failure", "rerunFailure", "flakyFailure", "skipped", "error", "rerunError", "flakyError")
# What the counts of a suite are called, and which elements they count.
COUNTS = {"tests": "testcase", "failures": "failure", "errors": "error", "skipped": "skipped"}


def render(history: History) -> str:
    """The content of the JUnit report."""
    cases = _Cases(history)
    for one in history.summary.finished:
        cases.add(one.test, _contents(one, history.summary.policy), one.seconds, one)
    for test in history.summary.unfinished:
        cases.add(test, [node("skipped", message=f"did not run: {text.why_unfinished(history.summary)}")])
    suites = [*cases.suites(), *_interruption(history.summary)]
    counts = {name: sum(int(suite.get(name, 0)) for suite in suites) for name in COUNTS if name != "skipped"}
    root = node("testsuites", *suites, name="run_test.py", **counts, time=_seconds(history.summary.seconds))
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


class _Cases:
    """The test cases of the report, by file."""

    def __init__(self, history: History):
        self._history = history
        self._by_file: dict[str, list[ET.Element]] = defaultdict(list)
        self._began: dict[str, float] = {}
        self._names: Counter[tuple[str, str]] = Counter()

    def add(
        self, test: Test, content: Sequence[ET.Element], seconds: float = 0.0, finished: FinishedTest | None = None
    ) -> None:
        file = test.id.file
        classname = _classname(file, test.id.cls)
        name = test.id.method or test.id.cls or file
        if finished is not None:
            name += text.repetition(finished.last, self._history.run.repetitions)
            self._began[file] = min(self._began.get(file, math.inf), finished.attempts[0].began)
        name, classname = text.printable(name), text.printable(classname)
        self._names[name, classname] += 1
        if (number := self._names[name, classname]) > 1:  # a reader would take them for the same test
            name += f" #{number}"
        self._by_file[file].append(node("testcase", *content, name=name, classname=classname, time=_seconds(seconds)))

    def suites(self) -> Iterator[ET.Element]:
        header = self._history.run.header
        facts = text.header_facts(header)
        for file, cases in self._by_file.items():
            yield _suite(
                file,
                cases,
                timestamp=_timestamp(self._history.run.clock + self._began.get(file, 0.0)),
                hostname=header.host or None,
                file=file,
                properties=node("properties", *(node("property", name=fact, value=value) for fact, value in facts)),
            )


def _suite(name: str, cases: Sequence[ET.Element], properties: ET.Element | None = None, **more: object) -> ET.Element:
    """A suite whose counts and time are those of its cases."""
    counts = {count: sum(_counts(case, tag) for case in cases) for count, tag in COUNTS.items()}
    seconds = sum(float(case.get("time", 0.0)) for case in cases)
    return node("testsuite", properties, *cases, name=name, **counts, time=_seconds(seconds), **more)


def _counts(case: ET.Element, tag: str) -> bool:
    return tag == "testcase" or case.find(tag) is not None


def _interruption(summary: Summary) -> Iterator[ET.Element]:
    """A case of its own: the file may be all that somebody sees of a run, and its tests alone may be green."""
    if summary.interrupted or summary.error:
        why = text.why_unfinished(summary)
        details = f"{why}; {text.count(len(summary.unfinished), 'test')} did not finish\n{summary.error}".rstrip()
        error = node("error", details, message=why)
        error.set("type", "error" if summary.error else "interrupted")
        case = node("testcase", error, name="the whole run", classname="run_test.py", time=_seconds(0.0))
        yield _suite("run_test.py", [case])


def _seconds(seconds: float) -> str:
    """A time as the schema wants it: decimal, not negative."""
    return f"{max(0.0, seconds) if math.isfinite(seconds) else 0.0:.3f}"


def _timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds")


def _classname(file: str, cls: str) -> str:
    module = file.removesuffix(".py").replace("/", ".")
    return f"{module}.{cls}" if cls else module


def _kind(one: FinishedTest, policy: Policy) -> str | None:
    """The element for the outcome of a test; None if it passed."""
    match policy.verdict_on(one):
        case Category.PASSED:
            return None
        case Category.SKIPPED:
            return "skipped"
        case Category.FAILED:
            return "failure" if one.outcome in FAILURES else "error"


def _contents(one: FinishedTest, policy: Policy) -> list[ET.Element]:
    results = sorted(_results(one, policy), key=lambda element: ORDER.index(element.tag))
    return [*results, *_output(one)]


def _results(one: FinishedTest, policy: Policy) -> Iterator[ET.Element]:
    kind = _kind(one, policy)
    failed = [attempt for attempt in one.attempts if policy.verdict(attempt.outcome) is Category.FAILED]
    if kind == "skipped":
        yield node("skipped", message=text.title(one.last.message))
    elif one.outcome is TestOutcome.FLAKY:
        if kind is not None:
            yield _failure(kind, TestOutcome.FLAKY, one.attempts[0])
        yield from (_rerun("flaky", attempt) for attempt in failed)
    elif kind is not None:
        first, *others = failed
        yield _failure(kind, one.outcome, first)
        yield from (_rerun("rerun", attempt) for attempt in others)


def _failure(tag: str, outcome: TestOutcome, attempt: Attempt) -> ET.Element:
    return node(tag, text.message(attempt.message), message=text.title(attempt.message), type=outcome.value)


def _rerun(prefix: str, attempt: Attempt) -> ET.Element:
    """A `rerunFailure`, `flakyError` and so on, which contains the output of its attempt."""
    suffix = "Failure" if attempt.outcome in FAILURES else "Error"
    children = [node("stackTrace", text.message(attempt.message)), *_outputs(attempt)]
    return node(prefix + suffix, *children, message=text.title(attempt.message), type=attempt.outcome.value)


def _output(one: FinishedTest) -> Iterator[ET.Element]:
    """The output of the attempt that the test case describes; the elements of other attempts contain theirs."""
    return _outputs(one.last if one.outcome is TestOutcome.FLAKY else one.attempts[0])


def _outputs(attempt: Attempt) -> Iterator[ET.Element]:
    ran_on = text.node_of(attempt.lease)
    parts = [f"ran on {ran_on}"] if ran_on else []
    parts += [f"{heading}:\n{words}" for heading, words in text.logs(attempt)]
    if attempt.leftovers:
        parts.append(f"left running (now terminated): {'; '.join(attempt.leftovers)}")
    if parts:
        yield node("system-out", "\n\n".join(parts))
