"""The output of --list and --dry-run. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from ..model import Attempt, Lease, Span, Test, Unit
from ..scheduling.plan import ExpectedSeconds
from . import text


def as_text(tests: Iterable[Test], broken: Iterable[Attempt]) -> Iterator[str]:
    """One line per test with what it needs, then one per broken file, then the counts."""
    tests, broken = list(tests), list(broken)
    for test in tests:
        yield "  ".join(part for part in (text.test_name(test.id), _needs(test)) if part)
    for attempt in broken:
        yield f"{text.test_name(attempt.test.id)}  broken: {text.title(attempt)}"
    skipped = sum(test.skip is not None for test in tests)
    counts = [text.count(len(tests), "test")]
    counts += [f"{skipped} of them skipped"] if skipped else []
    tests_not_run = sum(bool(attempt.test.id.method) for attempt in broken)
    counts += [text.count(len(broken) - tests_not_run, "broken file")] if len(broken) > tests_not_run else []
    counts += [f"{text.count(tests_not_run, 'test')} that cannot be run"] if tests_not_run else []
    yield ", ".join(counts)


def _needs(test: Test) -> str:
    if test.skip is not None:
        return f"skipped: {text.first_line(test.skip)}"
    needs = [text.count(test.world_size, "rank")] if test.world_size > 1 else []
    needs += [text.count(test.devices, "device")] if test.devices else []
    needs += [f"shared by {test.shared_by} ranks"] if test.shared_by else []
    needs += [str(test.of_devices)] if test.of_devices else []
    needs += [test.backend] if test.backend else []
    needs += [f"timeout {test.timeout:g} s"] if test.timeout is not None else []
    needs += [f"with {test.together}"] if test.together else []
    return ", ".join(needs)


def as_json(tests: Iterable[Test], broken: Iterable[Attempt], expected: ExpectedSeconds) -> str:
    """Everything that is known about the tests and the broken files."""
    content = {
        "tests": [_as_data(test, expected(test.id)) for test in tests],
        "broken": [
            {"id": str(attempt.test.id), "file": attempt.test.id.file, "message": attempt.said} for attempt in broken
        ],
    }
    return json.dumps(content, indent=1)


def _as_data(test: Test, seconds: float | None) -> dict[str, Any]:
    return {
        "id": str(test.id),
        "file": test.id.file,
        "class": test.id.cls,
        "method": test.id.method,
        "line": test.line,
        "world_size": test.world_size,
        "devices": test.devices,
        "shared_by": test.shared_by,
        "of_devices": asdict(test.of_devices) if test.of_devices else None,
        "backend": test.backend,
        "timeout": test.timeout,
        "marks": test.marks,
        "together": test.together,
        "skip": test.skip,
        "want": test.want,
        "expected_seconds": seconds,
    }


def schedule_as_text(planned: Sequence[Span]) -> Iterator[str]:
    """The result of a dry run: one line per unit, in the order in which they would start."""
    for span in planned:
        yield f"{span.began:8.1f} s  {_lease(span.lease):24}  {_names(span.unit)}"
    end = max((span.ended for span in planned), default=0.0)
    yield f"{text.count(len(planned), 'unit')}, {end:.1f} s expected"


def _lease(lease: Lease) -> str:
    devices, slots = (",".join(map(str, names)) for names in (lease.devices, lease.slots))
    return f"devices {devices}" if devices else f"slots {slots}"


def _names(unit: Unit) -> str:
    first, *others = unit.tests
    name = text.test_name(first.id)
    return f"{name} and {len(others)} more" if others else name
