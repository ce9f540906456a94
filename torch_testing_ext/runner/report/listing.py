"""The output of --list and --dry-run. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from torch_testing_ext._process.words import count
from torch_testing_ext.runner.model import Attempt, Lease, Span, Test, Unit
from torch_testing_ext.runner.scheduling.plan import ExpectedSeconds

from . import wording


def as_text(tests: Iterable[Test], broken: Iterable[Attempt]) -> Iterator[str]:
    """One line per test with what it needs, then one per broken file, then the counts."""
    number = 0
    skipped = 0
    for test in tests:
        number += 1
        skipped += test.skip is not None
        needs = _needs(test)
        name = wording.test_name(test.id)
        yield f"{name}  {needs}" if needs else name
    broken_files = 0
    broken_tests = 0
    for attempt in broken:
        if attempt.test.id.method:
            broken_tests += 1
        else:
            broken_files += 1
        yield f"{wording.test_name(attempt.test.id)}  broken: {wording.title(attempt)}"
    counts = [count(number, "test")]
    if skipped:
        counts.append(f"{skipped} of them skipped")
    if broken_files:
        counts.append(count(broken_files, "broken file"))
    if broken_tests:
        counts.append(f"{count(broken_tests, 'test')} that cannot be run")
    yield ", ".join(counts)


def _needs(test: Test) -> str:
    """The needs of a test in words, or the reason why it is skipped."""
    if test.skip is not None:
        return f"skipped: {wording.first_line(test.skip)}"
    needs = []
    if test.world_size > 1:
        needs.append(count(test.world_size, "rank"))
    if test.devices:
        needs.append(count(test.devices, "device"))
    if test.shared_by:
        needs.append(f"shared by {test.shared_by} ranks")
    if test.of_devices:
        needs.append(str(test.of_devices))
    if test.backend:
        needs.append(test.backend)
    if test.timeout is not None:
        needs.append(f"timeout {test.timeout:g} s")
    if test.together:
        needs.append(f"with {test.together}")
    return ", ".join(needs)


def as_json(tests: Iterable[Test], broken: Iterable[Attempt], expected: ExpectedSeconds) -> str:
    """Everything that is known about the tests and the broken files."""
    content = {
        "tests": [_as_data(test, expected(test.id)) for test in tests],
        "broken": [_broken_as_data(attempt) for attempt in broken],
    }
    return json.dumps(content, indent=1)


def _broken_as_data(attempt: Attempt) -> dict[str, str]:
    test = attempt.test.id
    return {"id": str(test), "file": test.file, "message": attempt.said}


def _as_data(test: Test, seconds: float | None) -> dict[str, Any]:
    """A test as an object of JSON."""
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


def schedule_as_text(planned: Sequence[Span], skipped: Sequence[Test]) -> Iterator[str]:
    """The result of a dry run: one line per unit in the order of their starts, then one per skipped test."""
    for span in planned:
        yield f"{span.began:8.1f} s  {_lease(span.lease):24}  {_names(span.unit)}"
    for test in skipped:
        yield f"   skipped  {wording.test_name(test.id)}: {wording.first_line(test.skip or '')}"
    end = max((span.ended for span in planned), default=0.0)
    also = f", {count(len(skipped), 'test')} skipped" if skipped else ""
    yield f"{count(len(planned), 'unit')}, {end:.1f} s expected{also}"


def _lease(lease: Lease) -> str:
    if lease.devices:
        return f"devices {','.join(lease.devices)}"
    slots = ",".join(str(slot) for slot in lease.slots)
    return f"slots {slots}"


def _names(unit: Unit) -> str:
    first, *others = unit.tests
    name = wording.test_name(first.id)
    return f"{name} and {len(others)} more" if others else name
