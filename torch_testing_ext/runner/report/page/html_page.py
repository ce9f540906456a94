"""The run as one HTML file, which refers to nothing outside it and is complete without JavaScript."""

from __future__ import annotations

import shlex
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from string import Template

from torch_testing_ext._process import user_commands
from torch_testing_ext._process.same_texts import without_accidents
from torch_testing_ext._process.words import count
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.runner.model import Attempt, FinishedTest, Summary, TestId
from torch_testing_ext.runner.report import brief_failures, wording
from torch_testing_ext.runner.report.lanes_of_run import all_lanes
from torch_testing_ext.runner.report.recorder import History
from torch_testing_ext.runner.report.sections import SECTIONS, section_of
from torch_testing_ext.runner.report.xml_elements import Element, Elements, xml_element

from .failure_part import render_failure
from .timeline import css_class, key_of, render_timeline

ASSETS = Path(__file__).parent
# The most important first.
ORDER_OF_VERDICTS = (TestOutcome.FAILED, TestOutcome.PASSED, TestOutcome.SKIPPED)
# The ways to sort the tests; page.js has an order for each first word.
SORTS = {
    "rank": "most important first",
    "seconds": "longest first",
    "began": "in the order of their start",
    "name": "by name",
}


def render_page(history: History, command: str = "", changes: Mapping[TestId, str] | None = None) -> str:
    """The HTML page. `command` runs the tests whose names are appended to it.

    `changes`: what is new of tests since an earlier run, in words.
    """
    parts = _body(_Page(history, command or user_commands.runner(), changes or {}))
    body = "\n".join(ET.tostring(part, encoding="unicode", method="html") for part in parts)
    asset = {kind: (ASSETS / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js")}
    title = f"{headline(history.summary)}: {user_commands.runner_name()}"
    return Template(asset["html"]).substitute(title=title, body=body, style=asset["css"], script=asset["js"])


def headline(summary: Summary) -> str:
    """The result of the run in a few words."""
    failed = summary.count(TestOutcome.FAILED)
    if summary.error:
        return f"Internal error of the runner: {count(failed, 'failure')} so far"
    if summary.interrupted:
        return f"Interrupted: {count(failed, 'failure')} so far"
    if failed:
        return f"{failed} of {count(len(summary.finished), 'test')} failed"
    passed = summary.count(TestOutcome.PASSED)
    return f"{count(passed, 'test')} passed" if passed else "No test passed or failed"


def _body(page: _Page) -> Elements:
    yield page.header()
    yield page.shares()
    yield from page.warnings()
    has_failures = page.has_failures
    if not has_failures:
        yield page.timeline()
    yield from page.causes()
    yield page.tests()
    if has_failures:
        yield page.timeline()
    yield from page.skips()


class _Page:
    """The parts of the page."""

    def __init__(self, history: History, command: str, changes: Mapping[TestId, str]):
        self._history = history
        self._summary = history.summary
        self._command = command
        self._changes = changes
        self.has_failures = bool(history.summary.failures)
        self._ordered = sorted(self._summary.finished, key=self._rank)
        self._anchors = {
            key_of(attempt): f"test-{number}"
            for number, finished in enumerate(self._ordered, 1)
            for attempt in finished.attempts
        }
        # The outcomes in the order of the page.
        self._counts = Counter(finished.outcome for finished in self._ordered)

    def _rank(self, finished: FinishedTest) -> tuple[int, int, float]:
        """Sorts failures first, then tests that did not pass cleanly, then passes, then skips; long ones first.

        Of the failures, those of tests on ranks come first, and files that could not be imported come last.
        """
        verdict = self._summary.policy.verdict_on(finished)
        if verdict is TestOutcome.FAILED:
            on_ranks = finished.test.world_size > 1 or any(attempt.ranks for attempt in finished.attempts)
            is_file = not finished.test.id.cls and not finished.test.id.method
            detail = 0 if on_ranks else 2 if is_file else 1
        else:
            detail = int(finished.outcome is TestOutcome.PASSED)
        return ORDER_OF_VERDICTS.index(verdict), detail, -finished.seconds

    def header(self) -> Element:
        began = datetime.fromtimestamp(self._history.run.clock, timezone.utc)
        when = xml_element("time", f"{began:%Y-%m-%d %H:%M} UTC", datetime=began.isoformat(timespec="seconds"))
        heading = xml_element("h1", headline(self._summary))
        left = xml_element("div", heading, xml_element("p", when, self._facts(), class_="facts"))
        theme = xml_element("button", "light / dark", id="theme", type="button")
        facts = wording.header_facts(self._history.run.header)
        origin = [xml_element("div", xml_element("dt", name), xml_element("dd", value)) for name, value in facts]
        title = xml_element("div", left, theme, class_="title")
        return xml_element("header", title, xml_element("dl", *origin, class_="origin"))

    def _facts(self) -> str:
        run = self._history.run
        facts = [wording.duration(self._summary.seconds), *wording.resources(run)]
        if run.seed is not None:
            facts.append(f"seed {run.seed}")
        return "".join(f" \N{MIDDLE DOT} {fact}" for fact in facts)

    def shares(self) -> Element:
        """The share of each outcome, as one bar."""
        parts = []
        for outcome, number in self._counts.items():
            title = f"{number} {outcome.value}"
            parts.append(xml_element("span", class_=css_class(outcome.value), style=f"flex: {number}", title=title))
        return xml_element("div", *parts, class_="share")

    def warnings(self) -> Elements:
        if self._summary.error:
            yield xml_element("pre", wording.printable(self._summary.error), class_="card warning")
        for warning in self._summary.warnings:
            yield xml_element("p", warning, class_="card warning")
        if self._summary.unfinished:
            unfinished = count(len(self._summary.unfinished), "test")
            names = [xml_element("li", wording.printable(str(test.id))) for test in self._summary.unfinished]
            title = xml_element("summary", f"{unfinished} did not finish: {wording.why_unfinished(self._summary)}")
            yield xml_element("details", title, xml_element("ul", *names), class_="card warning")

    def timeline(self) -> Element:
        zoom = xml_element("input", type="range", id="zoom", min=0, max=6, step=0.25, value=0, aria_label="zoom")
        heading = xml_element("h2", "Timeline: what ran where, and when")
        head = xml_element("div", heading, xml_element("label", "zoom ", zoom), class_="head")
        # A column of its own, which stays visible when the timeline scrolls.
        names = [xml_element("div", lane.name, title=lane.name) for lane in all_lanes(self._history)]
        column = xml_element("div", *names, class_="lanes")
        links = {key: f"#{anchor}" for key, anchor in self._anchors.items()}
        zoomed = xml_element("div", render_timeline(self._history, links), class_="zoomed")
        drawing = xml_element("div", zoomed, class_="scroll")
        return xml_element("section", head, xml_element("div", column, drawing, class_="chart"), class_="card")

    def tests(self) -> Element:
        hint = "Search names, messages and logs ( / )"
        search = xml_element("input", type="search", id="search", placeholder=hint, aria_label=hint)
        options = [xml_element("option", words, value=key) for key, words in SORTS.items()]
        sorts = xml_element("select", *options, id="sort")
        sort = xml_element("label", "sort ", sorts)
        tools = xml_element("div", search, *self._chips(), *self._filters(), sort, class_="tools")
        tests = [self._test(number, finished) for number, finished in enumerate(self._ordered)]
        rows = xml_element("div", *tests, id="tests", data_command=self._command)
        heading = xml_element("h2", "Tests", class_="unseen")
        return xml_element("section", heading, tools, rows, xml_element("p", id="shown", role="status"), class_="card")

    def causes(self) -> Elements:
        """The causes that several tests have failed for, with links to these."""
        rows = []
        for group in brief_failures.by_cause(self._summary.failures, self._summary.policy):
            if len(group) == 1:
                continue
            names: list[Element | str] = []
            for finished in group:
                name = finished.test.id.dotted or finished.test.id.file
                names += [xml_element("a", name, href=f"#{self._anchors[key_of(finished.last)]}"), " "]
            last_failure = brief_failures.failing_attempts(group[0], self._summary.policy)[-1]
            cause = xml_element("span", f"{wording.reason(last_failure)} ", xml_element("span", *names, class_="facts"))
            rows.append(xml_element("li", xml_element("b", str(len(group))), cause))
        if rows:
            yield _list_of_reasons("Failures with the same cause", rows)

    def _chips(self) -> Elements:
        for outcome, number in self._counts.items():
            kind = f"chip {css_class(outcome.value)}"
            parts = [xml_element("span", class_="dot"), xml_element("b", str(number)), outcome.value]
            data = {"data_outcome": css_class(outcome.value), "aria_pressed": "false"}
            yield xml_element("button", *parts, class_=kind, type="button", **data)

    def _filters(self) -> Elements:
        """A choice of machines, of needs, and of what is new, where the tests differ in that."""
        for title, value_of in (("machine", _machine), ("needs", _need), ("new", self._change)):
            numbers = Counter(map(value_of, self._ordered))
            if len(numbers) == 1:
                continue
            options = [xml_element("option", "all", value="")]
            for value, number in sorted(numbers.items()):
                if value:
                    options.append(xml_element("option", f"{value} ({number})", value=value))
            choice = xml_element("select", *options, class_="filter", name=title)
            yield xml_element("label", f"{title} ", choice)

    def _change(self, finished: FinishedTest) -> str:
        return self._changes.get(finished.test.id, "")

    def _test(self, number: int, finished: FinishedTest) -> Element:
        """A line to unfold, or only a line for one of the many that pass and have nothing to tell.

        The first failure is unfolded, since most readers look for it.
        """
        unfolded = number == 0 and self._summary.policy.verdict_on(finished) is TestOutcome.FAILED
        told = list(self._told(finished))
        facts = self._circumstances(finished)
        if told or finished.outcome is not TestOutcome.PASSED:
            rerun = xml_element("code", f"{self._command} {shlex.quote(str(finished.test.id))}")
            facts = [wording.outcome_in_words(finished), *facts]
            kind = "details"
            parts = [
                xml_element("summary", *self._line(finished)),
                _facts(facts),
                xml_element("div", rerun, class_="rerun"),
                *told,
            ]
        else:
            kind, parts = "div", [*self._line(finished), _facts(facts)]
        return xml_element(
            kind,
            *parts,
            class_=f"test {css_class(finished.outcome.value)}",
            id=f"test-{number + 1}",
            data_seconds=f"{finished.seconds:.4g}",
            data_began=f"{finished.attempts[0].began:.7g}",
            data_machine=_machine(finished) or None,
            data_needs=_need(finished) or None,
            data_new=self._change(finished) or None,
            open="" if unfolded else None,
        )

    def _line(self, finished: FinishedTest) -> Elements:
        test = finished.test.id
        *before, last = (part for part in (test.file, test.cls, test.method) if part)
        last += wording.repetition(finished.last, self._history.run.repetitions)
        prefix = "".join(f"{part}::" for part in before)
        yield xml_element("span", prefix, xml_element("b", last), class_="name")
        yield xml_element("span", *_took(finished), class_="took")
        said = [attempt for attempt in finished.attempts if attempt.said]
        if said:
            yield xml_element("span", wording.title(said[-1]), class_="why")

    def _told(self, finished: FinishedTest) -> Elements:
        """All that its attempts have left, but for facts that its line has."""
        seen: set[str] = set()
        for attempt in finished.attempts:
            pattern = without_accidents(wording.screen(attempt))
            alike = ", in the same way as before" if pattern and pattern in seen else ""
            seen.add(pattern)
            if len(finished.attempts) > 1:
                yield xml_element("p", f"attempt {attempt.number}: {attempt.outcome.value}{alike}", class_="attempt")
            yield from _attempt(attempt, bool(alike))
        for result in finished.last.end.results:
            yield from section_of(result).in_page_of_test(result)

    def _circumstances(self, finished: FinishedTest) -> list[str]:
        world_size = finished.test.world_size
        place = wording.place(finished.last.lease)
        want = finished.last.end.want
        parts = [
            self._change(finished),
            f"{world_size} ranks" if world_size > 1 else "",
            f"on {place}" if place else "",
            wording.memory(finished.last),
            wording.not_enough_devices(want) if want else "",
        ]
        return list(filter(None, parts))

    def skips(self) -> Elements:
        for section in SECTIONS:
            for title, rows in section.lists_of_page(self._summary):
                yield _list_of_reasons(title, rows)
        reasons = wording.skip_reasons(self._summary)
        if reasons:
            rows = [
                xml_element("li", xml_element("b", str(number)), xml_element("span", why)) for why, number in reasons
            ]
            yield _list_of_reasons("Skipped tests, by reason", rows)


def _list_of_reasons(title: str, rows: Sequence[Element]) -> Element:
    head = xml_element("div", xml_element("h2", title), class_="head")
    return xml_element("section", head, xml_element("ul", *rows, class_="reasons rest"), class_="card")


def _attempt(attempt: Attempt, is_known: bool = False) -> Elements:
    """The message of an attempt, unless it `is_known`, and all else folded."""
    if attempt.said and not is_known:
        yield xml_element("div", *render_failure(attempt), class_=f"failure {css_class(attempt.outcome.value)}")
    for result in attempt.end.results:
        yield from section_of(result).in_page_of_attempt(result)
    if attempt.end.leftovers:
        yield xml_element("p", f"Left running (now terminated): {'; '.join(attempt.end.leftovers)}", class_="facts")
    folded = []
    if wording.has_parts(attempt):
        folded.append(_log("the whole account", wording.account(attempt)))
    folded += [_log(title, words) for title, words in wording.logs(attempt)]
    if folded:
        yield xml_element("div", *folded, class_="logs")


def _log(title: str, words: str) -> Element:
    return xml_element("details", xml_element("summary", title), xml_element("pre", words), class_="log")


def _facts(facts: Sequence[str]) -> Element | None:
    return xml_element("span", " \N{MIDDLE DOT} ".join(facts), class_="facts") if facts else None


def _machine(finished: FinishedTest) -> str:
    return finished.last.lease.node


def _need(finished: FinishedTest) -> str:
    """The needs of a test beyond a process, in words."""
    test = finished.test
    if finished.last.end.want:
        return finished.last.end.want
    if test.devices:
        return count(test.devices, "device")
    return count(test.world_size, "rank") if test.world_size > 1 else ""


def _took(finished: FinishedTest) -> Iterator[Element | str]:
    """The duration of a test, and its outcome unless it passed: colour alone is not enough for every reader."""
    if finished.outcome is not TestOutcome.PASSED:
        yield xml_element("span", finished.outcome.value, class_="word")
    if finished.outcome is not TestOutcome.SKIPPED:
        yield wording.duration(finished.seconds)
