"""The run in Chrome's trace format, which Perfetto reads: one lane per device and per CPU slot. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ..model import Attempt
from . import text
from .history import History, Lane, Span, lanes

DEVICES, SLOTS = 1, 2  # lanes are threads of these two processes


def render(history: History) -> str:
    """The content of the trace file."""
    return json.dumps({"traceEvents": list(_events(history)), "displayTimeUnit": "ms"}, indent=1)


def _events(history: History) -> Iterator[dict[str, Any]]:
    for pid, name in (DEVICES, "devices"), (SLOTS, "CPU slots"):
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    for number, lane in enumerate(lanes(history)):
        place = {"pid": DEVICES if lane.is_device else SLOTS, "tid": number}
        yield {"ph": "M", "name": "thread_name", **place, "args": {"name": lane.name}}
        yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": number}}
        yield from ({**slice_, **place} for slice_ in _slices(lane, history.run.repetitions))


def _slices(lane: Lane, repetitions: int) -> Iterator[dict[str, Any]]:
    """Units come before their tests: Perfetto draws a slice below the slice that contains it."""
    for span in lane.spans:
        yield _slice(_title(span), "unit", span.began, span.ended, {"tests": len(span.unit.tests)})
    for attempt in lane.attempts:
        name = text.name(attempt, repetitions)
        yield _slice(name, attempt.outcome.value, attempt.began, attempt.began + attempt.seconds, _facts(attempt))


def _slice(name: str, category: str, began: float, ended: float, facts: dict[str, Any]) -> dict[str, Any]:
    """Rounds start and end, not the duration, to whole microseconds: a test must not exceed its unit."""
    at, end = round(began * 1e6), round(ended * 1e6)
    return {"ph": "X", "name": name, "cat": category, "ts": at, "dur": end - at, "args": facts}


def _title(span: Span) -> str:
    tests = span.unit.tests
    return f"unit: {tests[0].id}" if len(tests) == 1 else f"unit: {span.unit.file}, {len(tests)} tests"


def _facts(attempt: Attempt) -> dict[str, Any]:
    facts = {"outcome": attempt.outcome.value, "attempt": attempt.number, "ranks": attempt.test.world_size}
    return {**facts, "why": text.title(attempt.message)} if attempt.message else facts
