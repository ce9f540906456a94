"""The results of a run as JUnit XML, JSON, and a trace for Perfetto."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

from torch_testing_ext._collectives.failure import RankLane, bars, meetings
from torch_testing_ext._process.words import list_of
from torch_testing_ext.faults import SweepReport
from torch_testing_ext.runner.model import Attempt, Category, FinishedTest, Policy, RankLog, Summary, Test, TestOutcome

from . import text
from .journal import History, Lane, all_lanes, lanes_of
from .text import xml_element

Element = ET.Element
Elements = Iterator[Element]

# --------------------------------------------------------------------------------------------------------------------
# The run as JSON, for programs that need more than JUnit XML can express. Pure.
#
# Names and values are stable, since programs rely on them. `docs/reference/reports.md` lists them.


def render_json(history: History) -> str:
    """The content of the JSON report."""
    return json.dumps(json_document(history), indent=1) + "\n"


def json_document(history: History) -> dict[str, Any]:
    """The JSON report as a dictionary."""
    run, summary = history.run, history.summary
    return {
        "header": asdict(run.header),
        "began": run.clock,
        "seconds": summary.seconds,
        "devices": run.devices,
        "made_up_devices": run.fake,
        "slots": run.slots,
        "nodes": [{"name": node.name, "devices": node.devices, "slots": node.slots} for node in run.nodes],
        "seed": run.seed,
        "interrupted": summary.interrupted,
        "error": summary.error,
        "verdicts": {category.value: summary.count(category) for category in Category},
        "outcomes": Counter(finished.outcome.value for finished in summary.finished),
        "tests": [_test(finished, history) for finished in summary.finished],
        "drill": _drill(summary),
        "unfinished": [str(test.id) for test in summary.unfinished],
        "warnings": summary.warnings,
    }


def _test(finished: FinishedTest, history: History) -> dict[str, Any]:
    return {
        "id": str(finished.test.id),
        "file": finished.test.id.file,
        "line": finished.test.line,
        "repetition": finished.last.repetition,
        "outcome": finished.outcome.value,
        "counts_as": history.summary.policy.verdict_on(finished).value,
        "seconds": finished.seconds,
        "want": finished.last.end.want,
        "attempts": [_attempt(attempt) for attempt in finished.attempts],
    }


def _attempt(attempt: Attempt) -> dict[str, Any]:
    lease = attempt.lease
    return {
        "outcome": attempt.outcome.value,
        "message": text.message(attempt),
        "began": attempt.began,
        "seconds": attempt.seconds,
        "devices": lease.devices,
        "sharing": {"ranks": lease.shared_by, "backend": lease.over} if lease.shared_by else None,
        "slots": lease.slots,
        "node": lease.node or None,
        "device_memory": None if attempt.end.memory is None else asdict(attempt.end.memory),
        "output": text.log(attempt.output),
        "ranks": [_rank(log) for log in attempt.ranks],
        "leftovers": attempt.end.leftovers,
        "worlds": [asdict(view) for view in attempt.end.worlds],
    }


def _drill(summary: Summary) -> dict[str, Any] | None:
    """The results of a drill and of sweeps of tests; None without any."""
    swept = text.sweeps(summary)
    if not swept:
        return None
    return {"tests": [_sweep(result, report) for result, report in swept], "not_reached": text.not_reached(summary)}


def _sweep(finished: FinishedTest, report: SweepReport) -> dict[str, Any]:
    return {
        "id": str(finished.test.id),
        "asked_by": "drill" if report.is_drill else "test",
        "why_not": report.why_not or None,
        "cells": [{**asdict(cell), "end": cell.end.value} for cell in report.cells],
        "hang_no_more": text.hang_no_more(report) if report.is_drill else [],
    }


def _rank(log: RankLog) -> dict[str, Any]:
    return {"rank": log.rank, "output": text.log(log.output), "stacks": text.log(log.stacks)}


# --------------------------------------------------------------------------------------------------------------------
# The run as JUnit XML, valid by the schema junit-10 of Jenkins' xUnit plugin. Pure.
#
# Each test that counts as failed has one `failure`, whose type is the outcome, so that the number of failures is that
# of the console; the only `error` is an interrupted run. A test that failed in all attempts has `rerunFailure` for
# all but the first; a test that finally passed has a `flakyFailure` for each failed attempt. The order of these
# elements is that of Maven's Surefire, whose format it is. The schema has no place for a test's line; the JSON report
# has it.

ORDER = ("failure", "rerunFailure", "flakyFailure", "skipped")
# The counts of a suite, and the elements that they count.
COUNTS = {"tests": "testcase", "failures": "failure", "errors": "error", "skipped": "skipped"}


def render_junit(history: History) -> str:
    """The content of the JUnit report."""
    cases = _Cases(history)
    summary = history.summary
    for finished in summary.finished:
        cases.add(finished.test, _contents(finished, summary.policy), finished)
    for test in summary.unfinished:
        cases.add(test, [xml_element("skipped", message=f"did not run: {text.why_unfinished(summary)}")])
    suites = [*cases.suites(), *_interruption(summary)]
    counts = {}
    for name in COUNTS:
        # The schema has no such count for all suites.
        if name != "skipped":
            counts[name] = sum(int(suite.get(name, 0)) for suite in suites)
    root = xml_element("testsuites", *suites, name="run_test.py", **counts, time=_seconds(summary.seconds))
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
            name += text.repetition(finished.last, self._history.run.repetitions)
            self._began[file] = min(self._began.get(file, math.inf), finished.attempts[0].began)
        name, classname = text.printable(name), text.printable(classname)
        self._names[name, classname] += 1
        number = self._names[name, classname]
        if number > 1:
            # A reader would take them for the same test.
            name += f" #{number}"
        case = xml_element("testcase", *content, name=name, classname=classname, time=_seconds(seconds))
        self._by_file[file].append(case)

    def suites(self) -> Elements:
        run = self._history.run
        facts = text.header_facts(run.header)
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
        why = text.why_unfinished(summary)
        details = f"{why}; {text.count(len(summary.unfinished), 'test')} did not finish\n{summary.error}".rstrip()
        error = xml_element("error", details, message=why)
        error.set("type", "error" if summary.error else "interrupted")
        case = xml_element("testcase", error, name="the whole run", classname="run_test.py", time=_seconds(0.0))
        yield _suite("run_test.py", [case])


def _seconds(seconds: float) -> str:
    """A time as the schema wants it: decimal, not negative."""
    if not math.isfinite(seconds):
        seconds = 0.0
    return f"{max(0.0, seconds):.3f}"


def _contents(finished: FinishedTest, policy: Policy) -> list[Element]:
    results = sorted(_results(finished, policy), key=lambda element: ORDER.index(element.tag))
    # The output of the attempt that the test case describes; the elements of other attempts contain theirs.
    described = finished.last if finished.outcome is TestOutcome.FLAKY else finished.attempts[0]
    return [*results, *_outputs(described)]


def _results(finished: FinishedTest, policy: Policy) -> Elements:
    """The elements that say how a test ended; none if it passed."""
    category = policy.verdict_on(finished)
    failed = [attempt for attempt in finished.attempts if policy.verdict(attempt.outcome) is Category.FAILED]
    if category is Category.SKIPPED:
        yield xml_element("skipped", message=text.title(finished.last))
    elif finished.outcome is TestOutcome.FLAKY:
        if category is Category.FAILED:
            yield _failure(TestOutcome.FLAKY, finished.attempts[0])
        for attempt in failed:
            yield _rerun("flakyFailure", attempt)
    elif category is Category.FAILED:
        yield _failure(finished.outcome, failed[0])
        for attempt in failed[1:]:
            yield _rerun("rerunFailure", attempt)


def _failure(outcome: TestOutcome, attempt: Attempt) -> Element:
    return xml_element("failure", text.message(attempt), message=text.title(attempt), type=outcome.value)


def _rerun(tag: str, attempt: Attempt) -> Element:
    """The failure of another attempt, with its output."""
    children = [xml_element("stackTrace", text.message(attempt)), *_outputs(attempt)]
    return xml_element(tag, *children, message=text.title(attempt), type=attempt.outcome.value)


def _outputs(attempt: Attempt) -> Elements:
    ran_on = text.node_of(attempt.lease)
    parts = [f"ran on {ran_on}"] if ran_on else []
    parts += [text.world_in_words(view) for view in attempt.end.worlds]
    parts += [f"{heading}:\n{words}" for heading, words in text.logs(attempt)]
    parts += text.leftovers(attempt)
    if parts:
        yield xml_element("system-out", "\n\n".join(parts))


# --------------------------------------------------------------------------------------------------------------------
# The run in Chrome's trace format, which Perfetto reads: lanes for devices, CPU slots, ranks and imports. Pure.

# Lanes are threads of processes: these, and one for each place where ranks run.
DEVICES = 1
SLOTS = 2
IMPORTS = 3

# Worlds follow all places where ranks run.
_FIRST_WORLD = 1 << 16
# Of a call in a whole world, in seconds.
STEP = 1e-3

TraceEvent = dict[str, Any]
TraceEvents = Iterator[TraceEvent]


def render_perfetto(history: History) -> str:
    """The content of the trace file."""
    events = [*_events(history), *_imports(history), *_ranks(history), *_worlds(history)]
    timed = [event for event in events if "ts" in event]
    first = min((event["ts"] for event in timed), default=0)
    # Imports begin before the run does.
    if first < 0:
        for event in timed:
            event["ts"] -= first
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, indent=1)


def _events(history: History) -> TraceEvents:
    for pid, name in (DEVICES, "devices"), (SLOTS, "CPU slots"):
        yield from _process(pid, name)
    for number, lane in enumerate(all_lanes(history)):
        place = {"pid": DEVICES if lane.is_device else SLOTS, "tid": number}
        yield from _thread(place, lane.name)
        for slice_ in _slices(lane, history.run.repetitions):
            yield {**slice_, **place}


def _process(pid: int, name: str) -> TraceEvents:
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}


def _thread(place: dict[str, int], name: str) -> TraceEvents:
    yield {"ph": "M", "name": "thread_name", **place, "args": {"name": name}}
    yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": place["tid"]}}


def _imports(history: History) -> TraceEvents:
    """The imports before the run: those that overlap are in several lanes."""
    if history.imports:
        yield from _process(IMPORTS, "imports")
    # When each lane is free again.
    free_at: list[float] = []
    for span in sorted(history.imports, key=lambda span: span.began):
        free = [lane for lane, ended in enumerate(free_at) if ended <= span.began]
        if free:
            lane = free[0]
            free_at[lane] = span.ended
        else:
            lane = len(free_at)
            free_at.append(span.ended)
        place = {"pid": IMPORTS, "tid": lane}
        if not free:
            yield from _thread(place, "import")
        yield {**_slice(span.name, "import", span.began, span.ended, {}), **place}


def _ranks(history: History) -> TraceEvents:
    """The ranks of each test: tests that run at the same time have different devices or slots, hence processes."""
    drawn: list[tuple[Attempt, list[RankLane]]] = []
    for attempt in history.attempts:
        lanes = [log.lane for log in attempt.ranks if log.lane is not None]
        if lanes:
            drawn.append((attempt, lanes))
    places = dict.fromkeys(_place_of_ranks(attempt) for attempt, _ in drawn)
    pids = {place: IMPORTS + 1 + number for number, place in enumerate(places)}
    for place, pid in pids.items():
        yield from _process(pid, f"ranks of tests on {place}")
    threads = {(pids[_place_of_ranks(attempt)], lane.rank) for attempt, lanes in drawn for lane in lanes}
    for pid, rank in sorted(threads):
        yield from _thread({"pid": pid, "tid": rank}, f"rank {rank}")
    for number, (attempt, lanes) in enumerate(drawn):
        zero = history.run.clock
        if attempt.lease.node:
            # The clocks of nodes differ: there, the last rank ends with its test.
            zero = max(lane.ended for lane in lanes) - attempt.began - attempt.seconds
        yield from _ranks_of_test(lanes, attempt, {"pid": pids[_place_of_ranks(attempt)]}, zero, f"{number}")


def _worlds(history: History) -> TraceEvents:
    """The whole worlds of tests: a lane for each class of ranks. A step is a call, since time is not simulated."""
    number = _FIRST_WORLD
    for attempt in history.attempts:
        for view in attempt.end.worlds:
            if not any(alike.calls for alike in view.classes):
                continue
            name = f"whole world of {view.size} ranks, {STEP * 1e3:g} ms for each call, not its time"
            yield from _process(number, f"{name}: {attempt.test.id.dotted}")
            for lane, alike in enumerate(view.classes):
                place = {"pid": number, "tid": lane}
                yield from _thread(place, list_of(alike.ranks))
                for step, call in enumerate(alike.calls):
                    at = attempt.began + step * STEP
                    facts = {"group": call.group, "bytes": call.bytes, "line": call.site, "ranks": len(alike.ranks)}
                    yield {**_slice(call.name, "call", at, at + STEP, facts), **place}
            number += 1


def _place_of_ranks(attempt: Attempt) -> str:
    return next(lanes_of(attempt.lease), "no slot")


def _ranks_of_test(
    lanes: list[RankLane], attempt: Attempt, process: TraceEvent, zero: float, number: str
) -> TraceEvents:
    """The ranks of one test, their collectives, and an arrow for each of these. `zero`: when the run began."""
    for lane in lanes:
        place = {**process, "tid": lane.rank}
        began = lane.began - zero
        yield {**_slice("launch", "launch", lane.asked - zero, began, {}), **place}
        facts = {"test": str(attempt.test.id)}
        yield {**_slice(attempt.test.id.dotted, lane.how, began, lane.ended - zero, facts), **place}
    met = meetings(lanes)
    for bar in bars(lanes, met):
        call = bar.call
        facts_of_call = {"line": call.site, "over": call.is_over}
        slice_ = _slice(call.name, "collective", call.at - zero, bar.over - zero, facts_of_call)
        yield {**slice_, "dur": max(1, slice_["dur"]), **process, "tid": bar.rank}
    for place_of_call, calls in enumerate(met):
        ends = [(rank, call.at - zero) for rank, call in (calls[0], calls[-1])]
        yield from _arrow(f"{number}.{place_of_call}", ends, process)


def _arrow(name: str, ends: Iterable[tuple[int, float]], process: TraceEvent) -> TraceEvents:
    """An arrow between the calls of two ranks, which began at these times."""
    for phase, (rank, at) in zip(("s", "f"), ends, strict=True):
        yield {
            "ph": phase,
            "bp": "e",
            "id": name,
            "name": "waits for",
            "cat": "collective",
            "ts": round(at * 1e6),
            **process,
            "tid": rank,
        }


def _slices(lane: Lane, repetitions: int) -> TraceEvents:
    """Units come before their tests: Perfetto draws a slice below the slice that contains it."""
    for span in lane.spans:
        tests = span.unit.tests
        title = str(tests[0].id) if len(tests) == 1 else f"{span.unit.file}, {len(tests)} tests"
        yield _slice(f"unit: {title}", "unit", span.began, span.ended, {"tests": len(tests)})
    for attempt in lane.attempts:
        name = text.name(attempt, repetitions)
        ended = attempt.began + attempt.seconds
        yield _slice(name, attempt.outcome.value, attempt.began, ended, _facts(attempt))


def _slice(name: str, category: str, began: float, ended: float, facts: dict[str, Any]) -> TraceEvent:
    """Rounds start and end, not the duration, to whole microseconds: a test must not exceed its unit."""
    at, end = round(began * 1e6), round(ended * 1e6)
    # A rank may begin earlier, by its rounded clock, than it was asked for.
    return {"ph": "X", "name": name, "cat": category, "ts": at, "dur": max(0, end - at), "args": facts}


def _facts(attempt: Attempt) -> TraceEvent:
    facts = {"outcome": attempt.outcome.value, "attempt": attempt.number, "ranks": attempt.test.world_size}
    if attempt.said:
        facts["why"] = text.title(attempt)
    return facts
