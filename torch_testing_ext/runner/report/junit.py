"""The run as JUnit XML, valid by the schema junit-10 of Jenkins' xUnit plugin.

Each test that counts as failed has one `failure`, whose type is the outcome, so that the number of failures is that
of the console; the only `error` is an interrupted run. A test that failed in all attempts has `rerunFailure` for
all but the first; a test that finally passed has a `flakyFailure` for each failed attempt. The order of these
elements is that of Maven's Surefire, whose format it is. The schema has no place for a test's line; the JSON report
has it.
"""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import datetime, timezone

from torch_testing_ext._process.words import count
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.runner.model import Attempt, FinishedTest, Policy, Summary, Test

from . import wording
from .recorder import History
from .sections import section_of
from .xml_elements import Element, Elements, xml_element

ORDER_OF_ELEMENTS = ("failure", "rerunFailure", "flakyFailure", "skipped")
# The counts of a suite, and the elements that they count.
COUNTS = {"tests": "testcase", "failures": "failure", "errors": "error", "skipped": "skipped"}


def render_junit(history: History) -> str:
    """The content of the JUnit report."""
    cases = _Cases(history)
    summary = history.summary
    for finished in summary.finished:
        cases.add(finished.test, _contents(finished, summary.policy), finished)
    for test in summary.unfinished:
        cases.add(test, [xml_element("skipped", message=f"did not run: {wording.why_unfinished(summary)}")])
    suites = [*cases.suites(), *_interruption(summary)]
    counts = {}
    for name in COUNTS:
        # The schema has no such count for all suites.
        if name != "skipped":
            counts[name] = sum(int(suite.get(name, 0)) for suite in suites)
    root = xml_element("testsuites", *suites, name="torchtest", **counts, time=_seconds(summary.seconds))
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


class _Cases:
    """The test cases of the report, by file."""

    def __init__(self, history: History):
        self._history = history
        self._by_file: dict[str, list[Element]] = defaultdict(list)
        self._began: dict[str, float] = {}
        self._names: Counter[tuple[str, str]] = Counter()

    def add(self, test: Test, content: Sequence[Element], finished: FinishedTest | None = None) -> None:
        """Add the case of a test; of one that did not finish, without `finished`."""
        file = test.id.file
        seconds = 0.0
        module = file.removesuffix(".py").replace("/", ".")
        classname = f"{module}.{test.id.cls}" if test.id.cls else module
        name = test.id.method or test.id.cls or file
        if finished is not None:
            seconds = finished.seconds
            name += wording.repetition(finished.last, self._history.run.repetitions)
            self._began[file] = min(self._began.get(file, math.inf), finished.attempts[0].began)
        name, classname = wording.printable(name), wording.printable(classname)
        self._names[name, classname] += 1
        number = self._names[name, classname]
        if number > 1:
            # A reader would take them for the same test.
            name += f" #{number}"
        case = xml_element("testcase", *content, name=name, classname=classname, time=_seconds(seconds))
        self._by_file[file].append(case)

    def suites(self) -> Elements:
        run = self._history.run
        facts = wording.header_facts(run.header)
        for file, cases in self._by_file.items():
            began = datetime.fromtimestamp(run.clock + self._began.get(file, 0.0), timezone.utc)
            properties = [xml_element("property", name=fact, value=value) for fact, value in facts]
            yield _suite(
                file,
                cases,
                timestamp=began.isoformat(timespec="milliseconds"),
                hostname=run.header.host or None,
                file=file,
                properties=xml_element("properties", *properties),
            )


def _suite(name: str, cases: Sequence[Element], properties: Element | None = None, **more: object) -> Element:
    """A suite whose counts and time are those of its cases."""
    tags = [{case.tag, *(part.tag for part in case)} for case in cases]
    counts = {count: sum(tag in tags_of_case for tags_of_case in tags) for count, tag in COUNTS.items()}
    seconds = sum(float(case.get("time", 0.0)) for case in cases)
    return xml_element("testsuite", properties, *cases, name=name, **counts, time=_seconds(seconds), **more)


def _interruption(summary: Summary) -> Elements:
    """A case of its own: the file may be all that somebody sees of a run, and its tests alone may be green."""
    if summary.interrupted or summary.error:
        why = wording.why_unfinished(summary)
        details = f"{why}; {count(len(summary.unfinished), 'test')} did not finish\n{summary.error}".rstrip()
        error = xml_element("error", details, message=why)
        error.set("type", "error" if summary.error else "interrupted")
        case = xml_element("testcase", error, name="the whole run", classname="torchtest", time=_seconds(0.0))
        yield _suite("torchtest", [case])


def _seconds(seconds: float) -> str:
    """A time as the schema wants it: decimal, not negative."""
    if not math.isfinite(seconds):
        seconds = 0.0
    return f"{max(0.0, seconds):.3f}"


def _contents(finished: FinishedTest, policy: Policy) -> list[Element]:
    results = sorted(_results(finished, policy), key=lambda element: ORDER_OF_ELEMENTS.index(element.tag))
    # The output of the attempt that the test case describes; the elements of other attempts contain theirs.
    described = finished.last if finished.outcome is TestOutcome.FLAKY else finished.attempts[0]
    return [*results, *_outputs(described)]


def _results(finished: FinishedTest, policy: Policy) -> Elements:
    """The elements that say how a test ended; none if it passed."""
    verdict = policy.verdict_on(finished)
    failed = [attempt for attempt in finished.attempts if policy.verdict(attempt.outcome) is TestOutcome.FAILED]
    if verdict is TestOutcome.SKIPPED:
        yield xml_element("skipped", message=wording.title(finished.last))
    elif finished.outcome is TestOutcome.FLAKY:
        if verdict is TestOutcome.FAILED:
            yield _failure(TestOutcome.FLAKY, finished.attempts[0])
        for attempt in failed:
            yield _rerun("flakyFailure", attempt)
    elif verdict is TestOutcome.FAILED:
        yield _failure(finished.outcome, failed[0])
        for attempt in failed[1:]:
            yield _rerun("rerunFailure", attempt)


def _failure(outcome: TestOutcome, attempt: Attempt) -> Element:
    return xml_element("failure", wording.message(attempt), message=wording.title(attempt), type=outcome.value)


def _rerun(tag: str, attempt: Attempt) -> Element:
    """The failure of another attempt, with its output."""
    children = [xml_element("stackTrace", wording.message(attempt)), *_outputs(attempt)]
    return xml_element(tag, *children, message=wording.title(attempt), type=attempt.outcome.value)


def _outputs(attempt: Attempt) -> Elements:
    ran_on = wording.node_of(attempt.lease)
    parts = [f"ran on {ran_on}"] if ran_on else []
    parts += [words for result in attempt.end.results for words in section_of(result).in_junit(result)]
    parts += [f"{heading}:\n{words}" for heading, words in wording.logs(attempt)]
    parts += wording.leftovers(attempt)
    if parts:
        yield xml_element("system-out", "\n\n".join(parts))
