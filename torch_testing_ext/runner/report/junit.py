"""The run as JUnit XML, valid by the schema junit-10 of Jenkins' xUnit plugin. Pure.

Each test that counts as failed has one `failure`, whose type is the outcome, so that the number of failures is that of
the console; the only `error` is an interrupted run. A test that failed in all attempts has `rerunFailure` for all but
the first; a test that finally passed has a `flakyFailure` for each failed attempt. The order of these elements is that
of Maven's Surefire, whose format it is. The schema has no place for a test's line; the JSON report has it.
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

ORDER = ("failure", "rerunFailure", "flakyFailure", "skipped")
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
        module = file.removesuffix(".py").replace("/", ".")
        classname = f"{module}.{test.id.cls}" if test.id.cls else module
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
            began = datetime.fromtimestamp(self._history.run.clock + self._began.get(file, 0.0), timezone.utc)
            yield _suite(
                file,
                cases,
                timestamp=began.isoformat(timespec="milliseconds"),
                hostname=header.host or None,
                file=file,
                properties=node("properties", *(node("property", name=fact, value=value) for fact, value in facts)),
            )


def _suite(name: str, cases: Sequence[ET.Element], properties: ET.Element | None = None, **more: object) -> ET.Element:
    """A suite whose counts and time are those of its cases."""
    tags = [{case.tag, *(part.tag for part in case)} for case in cases]
    counts = {count: sum(tag in found for found in tags) for count, tag in COUNTS.items()}
    seconds = sum(float(case.get("time", 0.0)) for case in cases)
    return node("testsuite", properties, *cases, name=name, **counts, time=_seconds(seconds), **more)


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


def _contents(one: FinishedTest, policy: Policy) -> list[ET.Element]:
    results = sorted(_results(one, policy), key=lambda element: ORDER.index(element.tag))
    # The output of the attempt that the test case describes; the elements of other attempts contain theirs.
    return [*results, *_outputs(one.last if one.outcome is TestOutcome.FLAKY else one.attempts[0])]


def _results(one: FinishedTest, policy: Policy) -> Iterator[ET.Element]:
    category = policy.verdict_on(one)
    failed = [attempt for attempt in one.attempts if policy.verdict(attempt.outcome) is Category.FAILED]
    if category is Category.SKIPPED:
        yield node("skipped", message=text.title(one.last))
    elif one.outcome is TestOutcome.FLAKY:
        if category is Category.FAILED:
            yield _failure(TestOutcome.FLAKY, one.attempts[0])
        yield from (_rerun("flakyFailure", attempt) for attempt in failed)
    elif category is Category.FAILED:
        first, *others = failed
        yield _failure(one.outcome, first)
        yield from (_rerun("rerunFailure", attempt) for attempt in others)


def _failure(outcome: TestOutcome, attempt: Attempt) -> ET.Element:
    return node("failure", text.message(attempt), message=text.title(attempt), type=outcome.value)


def _rerun(tag: str, attempt: Attempt) -> ET.Element:
    """The failure of another attempt, with its output."""
    children = [node("stackTrace", text.message(attempt)), *_outputs(attempt)]
    return node(tag, *children, message=text.title(attempt), type=attempt.outcome.value)


def _outputs(attempt: Attempt) -> Iterator[ET.Element]:
    ran_on = text.node_of(attempt.lease)
    parts = [f"ran on {ran_on}"] if ran_on else []
    parts += [f"{heading}:\n{words}" for heading, words in text.logs(attempt)]
    parts += text.leftovers(attempt)
    if parts:
        yield node("system-out", "\n\n".join(parts))
