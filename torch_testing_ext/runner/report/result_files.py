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

from torch_testing_ext._collectives.lanes import RankLane, bars, meetings
from torch_testing_ext.runner.model import Attempt, Category, FinishedTest, Policy, Summary, Test, TestOutcome

from . import text
from .journal import History, Lane, lanes, lanes_of
from .text import node

# --------------------------------------------------------------------------------------------------------------------
# The run as JSON, for programs that need more than JUnit XML can express. Pure.
#
# Names and values are stable, since programs rely on them. `docs/run_test.md` lists them.


def render_json(history: History) -> str:
    """The content of the JSON report."""
    return json.dumps(document(history), indent=1) + "\n"


def document(history: History) -> dict[str, Any]:
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
        "outcomes": Counter(one.outcome.value for one in summary.finished),
        "tests": [_test(one, history) for one in summary.finished],
        "unfinished": [str(test.id) for test in summary.unfinished],
        "warnings": summary.warnings,
    }


def _test(one: FinishedTest, history: History) -> dict[str, Any]:
    return {
        "id": str(one.test.id),
        "file": one.test.id.file,
        "line": one.test.line,
        "repetition": one.last.repetition,
        "outcome": one.outcome.value,
        "counts_as": history.summary.policy.verdict_on(one).value,
        "seconds": one.seconds,
        "want": one.last.want,
        "attempts": [_attempt(attempt) for attempt in one.attempts],
    }


def _attempt(attempt: Attempt) -> dict[str, Any]:
    return {
        "outcome": attempt.outcome.value,
        "message": text.message(attempt),
        "began": attempt.began,
        "seconds": attempt.seconds,
        "devices": attempt.lease.devices,
        "sharing": {"ranks": attempt.lease.shared_by, "backend": attempt.lease.over}
        if attempt.lease.shared_by
        else None,
        "slots": attempt.lease.slots,
        "node": attempt.lease.node or None,
        "device_memory": asdict(attempt.memory) if attempt.memory is not None else None,
        "output": text.log(attempt.output),
        "ranks": [
            {"rank": one.rank, "output": text.log(one.output), "stacks": text.log(one.stacks)} for one in attempt.ranks
        ],
        "leftovers": attempt.leftovers,
    }


# --------------------------------------------------------------------------------------------------------------------
# The run as JUnit XML, valid by the schema junit-10 of Jenkins' xUnit plugin. Pure.
#
# Each test that counts as failed has one `failure`, whose type is the outcome, so that the number of failures is that
# of the console; the only `error` is an interrupted run. A test that failed in all attempts has `rerunFailure` for
# all but the first; a test that finally passed has a `flakyFailure` for each failed attempt. The order of these
# elements is that of Maven's Surefire, whose format it is. The schema has no place for a test's line; the JSON report
# has it.

ORDER = ("failure", "rerunFailure", "flakyFailure", "skipped")
# What the counts of a suite are called, and which elements they count.
COUNTS = {"tests": "testcase", "failures": "failure", "errors": "error", "skipped": "skipped"}


def render_junit(history: History) -> str:
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


# --------------------------------------------------------------------------------------------------------------------
# The run in Chrome's trace format, which Perfetto reads: lanes for devices, CPU slots, ranks and imports. Pure.

DEVICES, SLOTS, IMPORTS = 1, 2, 3  # lanes are threads of processes: these, and one for each place where ranks run

TraceEvent = dict[str, Any]


def render_perfetto(history: History) -> str:
    """The content of the trace file."""
    events = [*_events(history), *_imports(history), *_ranks(history)]
    before = min((event["ts"] for event in events if "ts" in event), default=0)
    if before < 0:  # what came before the run
        events = [{**event, "ts": event["ts"] - before} if "ts" in event else event for event in events]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, indent=1)


def _events(history: History) -> Iterator[TraceEvent]:
    for pid, name in (DEVICES, "devices"), (SLOTS, "CPU slots"):
        yield from _process(pid, name)
    for number, lane in enumerate(lanes(history)):
        place = {"pid": DEVICES if lane.is_device else SLOTS, "tid": number}
        yield from _thread(place, lane.name)
        yield from ({**slice_, **place} for slice_ in _slices(lane, history.run.repetitions))


def _process(pid: int, name: str) -> Iterator[TraceEvent]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}


def _thread(place: dict[str, int], name: str) -> Iterator[TraceEvent]:
    yield {"ph": "M", "name": "thread_name", **place, "args": {"name": name}}
    yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": place["tid"]}}


def _imports(history: History) -> Iterator[TraceEvent]:
    """The imports before the run: those that overlap are in several lanes."""
    if history.imports:
        yield from _process(IMPORTS, "imports")
    free: list[float] = []  # when each lane is
    for one in sorted(history.imports, key=lambda one: one.began):
        lane = next((at for at, end in enumerate(free) if end <= one.began), len(free))
        place = {"pid": IMPORTS, "tid": lane}
        if lane == len(free):
            yield from _thread(place, "import")
        free[lane : lane + 1] = [one.ended]
        yield {**_slice(one.name, "import", one.began, one.ended, {}), **place}


def _ranks(history: History) -> Iterator[TraceEvent]:
    """The ranks of each test: tests that run at the same time have different devices or slots, hence processes."""
    drawn = [(one, [log.lane for log in one.ranks if log.lane is not None]) for one in history.attempts]
    drawn = [(one, each) for one, each in drawn if each]
    places = list(dict.fromkeys(_place_of_ranks(one) for one, _ in drawn))
    pids = {place: IMPORTS + 1 + number for number, place in enumerate(places)}
    for place, pid in pids.items():
        yield from _process(pid, f"ranks of tests on {place}")
    for pid, rank in sorted({(pids[_place_of_ranks(one)], lane.rank) for one, each in drawn for lane in each}):
        yield from _thread({"pid": pid, "tid": rank}, f"rank {rank}")
    for number, (one, each) in enumerate(drawn):
        # The clocks of nodes differ: there, the last rank ends with its test.
        end = max(lane.ended for lane in each)
        zero = end - one.began - one.seconds if one.lease.node else history.run.clock
        yield from _of_test(each, one, {"pid": pids[_place_of_ranks(one)]}, zero, f"{number}")


def _place_of_ranks(attempt: Attempt) -> str:
    return next(lanes_of(attempt.lease), "no slot")


def _of_test(ranks: list[RankLane], attempt: Attempt, of: TraceEvent, zero: float, number: str) -> Iterator[TraceEvent]:
    for lane in ranks:
        place = {**of, "tid": lane.rank}
        asked, began, ended = (at - zero for at in (lane.asked, lane.began, lane.ended))
        yield {**_slice("launch", "launch", asked, began, {}), **place}
        yield {**_slice(attempt.test.id.dotted, lane.how, began, ended, {"test": str(attempt.test.id)}), **place}
    met = meetings(ranks)
    for bar in bars(ranks, met):
        facts: dict[str, Any] = {"line": bar.call.site, "over": bar.call.is_over}
        slice_ = _slice(bar.call.name, "collective", bar.call.at - zero, bar.over - zero, facts)
        yield {**slice_, "dur": max(1, slice_["dur"]), **of, "tid": bar.rank}
    for at, calls in enumerate(met):
        yield from _arrow(f"{number}.{at}", [(rank, call.at - zero) for rank, call in (calls[0], calls[-1])], of)


def _arrow(name: str, ends: Iterable[tuple[int, float]], of: TraceEvent) -> Iterator[TraceEvent]:
    """An arrow between the calls of two ranks, which began at these times."""
    for phase, (rank, at) in zip(("s", "f"), ends, strict=True):
        yield {"ph": phase, "bp": "e", "id": name, "name": "waits for", "cat": "collective", "ts": round(at * 1e6),
               **of, "tid": rank}  # fmt: skip


def _slices(lane: Lane, repetitions: int) -> Iterator[TraceEvent]:
    """Units come before their tests: Perfetto draws a slice below the slice that contains it."""
    for span in lane.spans:
        first, *others = span.unit.tests
        title = f"{span.unit.file}, {len(span.unit.tests)} tests" if others else first.id
        yield _slice(f"unit: {title}", "unit", span.began, span.ended, {"tests": len(span.unit.tests)})
    for attempt in lane.attempts:
        name = text.name(attempt, repetitions)
        yield _slice(name, attempt.outcome.value, attempt.began, attempt.began + attempt.seconds, _facts(attempt))


def _slice(name: str, category: str, began: float, ended: float, facts: dict[str, Any]) -> TraceEvent:
    """Rounds start and end, not the duration, to whole microseconds: a test must not exceed its unit."""
    at, end = round(began * 1e6), round(ended * 1e6)
    # A rank may begin earlier, by its rounded clock, than it was asked for.
    return {"ph": "X", "name": name, "cat": category, "ts": at, "dur": max(0, end - at), "args": facts}


def _facts(attempt: Attempt) -> TraceEvent:
    facts = {"outcome": attempt.outcome.value, "attempt": attempt.number, "ranks": attempt.test.world_size}
    return {**facts, "why": text.title(attempt)} if attempt.said else facts
