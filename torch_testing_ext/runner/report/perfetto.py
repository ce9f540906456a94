"""The run in Chrome's trace format, which Perfetto reads: lanes for devices, CPU slots, ranks and imports. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from torch_testing_ext._collectives.lanes import RankLane, bars, meetings

from ..model import Attempt
from . import text
from .history import History, Lane, lanes, lanes_of

DEVICES, SLOTS, IMPORTS = 1, 2, 3  # lanes are threads of processes: these, and one for each place where ranks run

Event = dict[str, Any]


def render(history: History) -> str:
    """The content of the trace file."""
    events = [*_events(history), *_imports(history), *_ranks(history)]
    before = min((event["ts"] for event in events if "ts" in event), default=0)
    if before < 0:  # what came before the run
        events = [{**event, "ts": event["ts"] - before} if "ts" in event else event for event in events]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, indent=1)


def _events(history: History) -> Iterator[Event]:
    for pid, name in (DEVICES, "devices"), (SLOTS, "CPU slots"):
        yield from _process(pid, name)
    for number, lane in enumerate(lanes(history)):
        place = {"pid": DEVICES if lane.is_device else SLOTS, "tid": number}
        yield from _thread(place, lane.name)
        yield from ({**slice_, **place} for slice_ in _slices(lane, history.run.repetitions))


def _process(pid: int, name: str) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}


def _thread(place: dict[str, int], name: str) -> Iterator[Event]:
    yield {"ph": "M", "name": "thread_name", **place, "args": {"name": name}}
    yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": place["tid"]}}


def _imports(history: History) -> Iterator[Event]:
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


def _ranks(history: History) -> Iterator[Event]:
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


def _of_test(ranks: list[RankLane], attempt: Attempt, of: Event, zero: float, number: str) -> Iterator[Event]:
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


def _arrow(name: str, ends: Iterable[tuple[int, float]], of: Event) -> Iterator[Event]:
    """An arrow between the calls of two ranks, which began at these times."""
    for phase, (rank, at) in zip(("s", "f"), ends, strict=True):
        yield {"ph": phase, "bp": "e", "id": name, "name": "waits for", "cat": "collective", "ts": round(at * 1e6),
               **of, "tid": rank}  # fmt: skip


def _slices(lane: Lane, repetitions: int) -> Iterator[Event]:
    """Units come before their tests: Perfetto draws a slice below the slice that contains it."""
    for span in lane.spans:
        first, *others = span.unit.tests
        title = f"{span.unit.file}, {len(span.unit.tests)} tests" if others else first.id
        yield _slice(f"unit: {title}", "unit", span.began, span.ended, {"tests": len(span.unit.tests)})
    for attempt in lane.attempts:
        name = text.name(attempt, repetitions)
        yield _slice(name, attempt.outcome.value, attempt.began, attempt.began + attempt.seconds, _facts(attempt))


def _slice(name: str, category: str, began: float, ended: float, facts: dict[str, Any]) -> Event:
    """Rounds start and end, not the duration, to whole microseconds: a test must not exceed its unit."""
    at, end = round(began * 1e6), round(ended * 1e6)
    return {"ph": "X", "name": name, "cat": category, "ts": at, "dur": end - at, "args": facts}


def _facts(attempt: Attempt) -> Event:
    facts = {"outcome": attempt.outcome.value, "attempt": attempt.number, "ranks": attempt.test.world_size}
    return {**facts, "why": text.title(attempt)} if attempt.said else facts
