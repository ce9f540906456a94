"""From the tests that are selected to the units that will run, and the tests that need not run to be skipped. Pure."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..model import Test, TestId, Unit
from ..options.options import Options, Rerun, ShardSpec
from .inventory import Inventory
from .policy import Order, no_preference

# Seconds that every unit costs besides: a shard of a thousand tests that take nothing takes time.
OVERHEAD = 0.05

ExpectedSeconds = Callable[[TestId], float | None]


@dataclass(frozen=True)
class Plan:
    units: tuple[Unit, ...]
    skipped: tuple[Test, ...]  # each with its reason

    @property
    def tests(self) -> tuple[Test, ...]:
        """Each once, however often it is repeated."""
        first = (test for unit in self.units if unit.repetition == 0 for test in unit.tests)
        return tuple(sorted((*first, *self.skipped), key=lambda test: (test.id.file, test.line, test.id)))


def plan(tests: Iterable[Test], there: Inventory, expected: ExpectedSeconds, repetitions: int = 1) -> Plan:
    tests = tuple(_with_devices(test, there) for test in tests)
    groups = list(together(test for test in tests if test.skip is None))
    numbers = itertools.count()
    units = tuple(
        Unit(next(numbers), tuple(group), repetition, seconds=_seconds(group, expected))
        for repetition in range(repetitions)
        for group in groups
    )
    return Plan(units, tuple(test for test in tests if test.skip is not None))


def _with_devices(test: Test, there: Inventory) -> Test:
    """Skipped where it needs more devices than one process can have."""
    if test.skip is not None or test.devices <= there.most_at_once:
        return test
    want = f"{test.devices} devices" if test.devices > 1 else "1 device"
    return dataclasses.replace(test, skip=f"needs {want}, {there.most_at_once} to be had", want=want)


def together(tests: Iterable[Test]) -> Iterator[list[Test]]:
    """Tests that share class fixtures in one list, in the order of their first."""
    groups: dict[object, list[Test]] = {}
    for test in tests:
        groups.setdefault((test.id.file, test.together) if test.together else test.id, []).append(test)
    return iter(groups.values())


def _seconds(tests: Sequence[Test], expected: ExpectedSeconds) -> float | None:
    """Where some are not known, as if they took as long as the others on average."""
    known = [seconds for test in tests if (seconds := expected(test.id)) is not None]
    return sum(known) / len(known) * len(tests) if known else None


def shard(tests: Sequence[Test], part: ShardSpec, expected: ExpectedSeconds) -> tuple[Test, ...]:
    """Its part of the tests. All parts together are all tests, each once, if all know the same durations."""
    groups = list(together(tests))
    known = [_seconds(group, expected) for group in groups]
    if not any(seconds is not None for seconds in known):
        mine = [group for group in groups if _by_hash(group, part.count) == part.index - 1]
    else:
        mine = _by_durations(groups, known, part)
    return tuple(test for group in mine for test in group)


def _by_hash(group: Sequence[Test], count: int) -> int:
    """The same whatever else there is: a new test moves no other one to another shard."""
    first = group[0].id
    name = f"{first.file}::{group[0].together}" if group[0].together else str(first)
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % count


def _by_durations(groups: list[list[Test]], known: list[float | None], part: ShardSpec) -> list[list[Test]]:
    """Longest first, each to the part with the least work so far."""
    certain = [seconds for seconds in known if seconds is not None]
    typical = sum(certain) / len(certain)
    work = [0.0] * part.count
    mine = []
    timed = [(typical if seconds is None else seconds, group) for seconds, group in zip(known, groups, strict=True)]
    for seconds, group in sorted(timed, key=lambda one: (-one[0], one[1][0].id)):
        least = work.index(min(work))
        work[least] += seconds + OVERHEAD
        if least == part.index - 1:
            mine.append(group)
    return mine


def order(options: Options, failed: Callable[[TestId], bool]) -> Order:
    """Which units go before others whatever their size."""
    if options.shuffle:
        return lambda unit: _drawn(options.seed, unit)
    if options.again is Rerun.FAILED_FIRST:
        return lambda unit: not any(failed(test.id) for test in unit.tests)
    return no_preference


def _drawn(seed: int | None, unit: Unit) -> bytes:
    """A place by chance that depends on nothing but the seed and the unit: leaving out a test reorders no others."""
    return hashlib.sha256(f"{seed} {unit.repetition} {unit.tests[0].id}".encode()).digest()
