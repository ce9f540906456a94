"""The run in Chrome's trace format, which Perfetto reads: lanes for devices, CPU slots, ranks and imports."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from torch_testing_ext._collectives.lanes_of_ranks import RankLane, bars, meetings
from torch_testing_ext.runner.model import Attempt

from . import wording
from .lanes_of_run import Lane, all_lanes, lanes_of
from .recorder import History
from .sections import section_of

# Lanes are threads of processes: these, and one for each place where ranks run.
DEVICES = 1
SLOTS = 2
IMPORTS = 3

# What sections draw follows all places where ranks run.
_FIRST_OF_SECTIONS = 1 << 16

TraceEvent = dict[str, Any]
TraceEvents = Iterator[TraceEvent]


def render_perfetto(history: History) -> str:
    """The content of the trace file."""
    events = [*_events(history), *_imports(history), *_ranks(history), *_sections(history)]
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
    # The moment at which each lane is free again.
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


def _sections(history: History) -> TraceEvents:
    drawn = [(attempt, result) for attempt in history.attempts for result in attempt.end.results]
    processes = [one for attempt, result in drawn for one in section_of(result).in_trace(attempt, result)]
    for pid, process in enumerate(processes, _FIRST_OF_SECTIONS):
        yield from _process(pid, process.name)
        for lane, (name, slices) in enumerate(process.lanes):
            place = {"pid": pid, "tid": lane}
            yield from _thread(place, name)
            for slice_ in slices:
                yield {**_slice(*slice_), **place}


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
    ended = {lane.rank: lane.ended for lane in lanes}
    for place_of_call, meeting in enumerate(met):
        first_rank, first = meeting.calls[0]
        last_rank, at = meeting.last
        ends = [(first_rank, first.at - zero), (last_rank, (ended[last_rank] if at is None else at) - zero)]
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
        name = wording.name(attempt, repetitions)
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
        facts["why"] = wording.title(attempt)
    return facts
