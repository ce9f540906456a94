"""Turns selected tests into units to run and tests to skip, splits tests into shards, and checks results. Pure."""

import dataclasses
import hashlib
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch_testing_ext._collectives.records import grouped
from torch_testing_ext._machine.device_facts import why_not

from ..model import Attempt, FinishedTest, Summary, Test, TestId, TestOutcome, Unit
from ..options.options import Options, Rerun, ShardSpec
from .inventory import Inventory
from .policy import Priority, no_preference

# Seconds that every unit takes in addition to its tests: even a thousand empty tests take time.
OVERHEAD = 0.05

NO_RESULT = "the runner lost this test: it was planned, and there is no result (an error of the runner)"

_ABOUT_DEVICES = re.compile(r"\b(cuda|gpus?|accelerators?|nccl|xpu|rocm|hip)\b", re.IGNORECASE)
_MOST = 3  # names in the warning
_NO_RESULT = (TestOutcome.SKIPPED, TestOutcome.ERROR, TestOutcome.FAILED)

ExpectedSeconds = Callable[[TestId], float | None]


@dataclass(frozen=True)
class Plan:
    """The units of a run, and the tests that it skips without running them."""

    units: tuple[Unit, ...]
    skipped: tuple[Test, ...]  # each with its reason

    @property
    def tests(self) -> tuple[Test, ...]:
        """All tests, each once even if it is repeated."""
        first = (test for unit in self.units if unit.repetition == 0 for test in unit.tests)
        return tuple(sorted((*first, *self.skipped), key=lambda test: (test.id.file, test.line, test.id)))


def plan(tests: Iterable[Test], inventory: Inventory, expected: ExpectedSeconds, repetitions: int = 1) -> Plan:
    """Groups the tests into units, and skips tests that need more devices than there are."""
    tests = tuple(_with_devices_of(inventory, test) for test in tests)
    fixtures = group_by_fixtures(test for test in tests if test.skip is None)
    groups = [part for group in fixtures for part in _fitting(group, inventory)]
    numbers = itertools.count()
    units = tuple(
        Unit(next(numbers), tuple(group), repetition, seconds=_seconds(group, expected))
        for repetition in range(repetitions)
        for group in groups
    )
    return Plan(units, tuple(test for test in tests if test.skip is not None))


def _with_devices_of(inventory: Inventory, test: Test) -> Test:
    """The test with devices that its ranks share if there are too few; skipped if no devices have what it needs."""
    if test.skip is not None or not test.devices:
        return test
    if test.devices > inventory.most_at_once:
        shares = test.devices <= inventory.most_ranks and test.devices <= test.world_size
        if not shares or test.of_devices.of_several:  # ranks on one device have no connection
            return _skipped_for_devices(test, inventory)
        test = dataclasses.replace(test, devices=inventory.most_at_once, shared_by=test.devices)
    if not test.of_devices or inventory.fake:
        return test
    why = why_not(inventory.facts, test.of_devices, test.devices)
    if why is None:
        return test
    want = f"{test.devices} device{'s' if test.devices > 1 else ''} with {test.of_devices}"
    return dataclasses.replace(test, skip=f"needs {want}: {why}", want=want)


def _fitting(group: list[Test], inventory: Inventory) -> list[list[Test]]:
    """The group, or each test by itself if no devices have what all of them need together."""
    unit = Unit(0, tuple(group))
    if inventory.fake or not unit.of_devices or not why_not(inventory.facts, unit.of_devices, unit.devices):
        return [group]
    return [[test] for test in group]


def _skipped_for_devices(test: Test, inventory: Inventory) -> Test:
    want = f"{test.devices} devices" if test.devices > 1 else "1 device"
    available = f"{inventory.most_at_once} available{' on one node' if len(inventory.nodes) > 1 else ''}"
    if inventory.ranks_per_device > 1 and inventory.most_at_once:
        one_rank = f"for {test.world_size} process{'es' if test.world_size > 1 else ''}"
        many = f"for at most {inventory.most_ranks} ranks"
        available += f", {one_rank if test.devices > test.world_size else many}"
    return dataclasses.replace(test, skip=f"needs {want}, {available}", want=want)


def group_by_fixtures(tests: Iterable[Test]) -> Iterator[list[Test]]:
    """Groups tests that share class fixtures. Groups are in the order of their first tests."""
    keyed = (((test.id.file, test.together) if test.together else test.id, test) for test in tests)
    return iter(grouped(keyed).values())


def _seconds(tests: Sequence[Test], expected: ExpectedSeconds) -> float | None:
    """The expected duration of a group. Tests of unknown duration count as the average of the others."""
    known = [seconds for test in tests if (seconds := expected(test.id)) is not None]
    return sum(known) / len(known) * len(tests) if known else None


def shard(tests: Sequence[Test], part: ShardSpec, expected: ExpectedSeconds) -> tuple[Test, ...]:
    """The tests of one shard. Every test is in exactly one shard, if all shards know the same durations."""
    groups = list(group_by_fixtures(tests))
    known = [_seconds(group, expected) for group in groups]
    if not any(seconds is not None for seconds in known):
        chosen = [group for group in groups if _by_hash(group, part.count) == part.index - 1]
    else:
        chosen = _by_durations(groups, known, part)
    return tuple(test for group in chosen for test in group)


def _by_hash(group: Sequence[Test], count: int) -> int:
    """The index of a group's shard. It depends only on the group: a new test moves no other test to another shard."""
    first = group[0].id
    name = f"{first.file}::{group[0].together}" if group[0].together else str(first)
    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8], "big") % count


def _by_durations(groups: list[list[Test]], known: list[float | None], part: ShardSpec) -> list[list[Test]]:
    """Assigns the longest group first, each to the shard with the least work so far."""
    measured = [seconds for seconds in known if seconds is not None]
    typical = sum(measured) / len(measured)
    work = [0.0] * part.count
    chosen = []
    timed = [(typical if seconds is None else seconds, group) for seconds, group in zip(known, groups, strict=True)]
    for seconds, group in sorted(timed, key=lambda one: (-one[0], one[1][0].id)):
        least = work.index(min(work))
        work[least] += seconds + OVERHEAD
        if least == part.index - 1:
            chosen.append(group)
    return chosen


def priority(options: Options, failed: Callable[[TestId], bool]) -> Priority:
    """The units that start before others regardless of their size, by --shuffle or --failed-first."""
    if options.shuffle:
        # Depends only on the seed and the unit, so that leaving out a test does not reorder the others.
        return lambda one: hashlib.sha256(os.fsencode(f"{options.seed} {one.repetition} {one.tests[0].id}")).digest()
    if options.rerun is Rerun.FAILED_FIRST:
        return lambda unit: not any(failed(test.id) for test in unit.tests)
    return no_preference


# -- checks of the results


def without_result(plan: Plan, summary: Summary) -> tuple[FinishedTest, ...]:
    """An error for each test of a plan that has no result, although the run was neither stopped nor interrupted.

    No way is known to lose a test; one that is lost must not be taken for one that has passed.
    """
    known = {(one.test.id, one.last.repetition) for one in summary.finished}
    unfinished = {test.id for test in summary.unfinished}
    planned = [(test, unit.repetition) for unit in plan.units for test in unit.tests]
    return tuple(
        FinishedTest((Attempt(test, TestOutcome.ERROR, NO_RESULT, repetition=repetition),))
        for test, repetition in (*planned, *((test, 0) for test in plan.skipped))
        if (test.id, repetition) not in known and test.id not in unfinished
    )


def describe_undeclared(finished: Iterable[FinishedTest]) -> str | None:
    """The warning about tests that leased no device, and then were skipped or failed with words about devices."""
    names = list(dict.fromkeys(str(one.test.id) for one in finished if _may_lack_a_device(one)))
    if not names:
        return None
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    tests = "1 test" if len(names) == 1 else f"{len(names)} tests"
    return (
        f"{tests} may need devices, but declared none and so saw none (declare them, for example by "
        f"@skip_if_lt_x_gpu(1)): {', '.join(names[:_MOST])}{more}"
    )


def _may_lack_a_device(one: FinishedTest) -> bool:
    skipped_before = one.last.want is not None or one.test.skip is not None
    return (
        one.outcome in _NO_RESULT
        and not one.test.devices
        and not skipped_before
        and bool(one.test.id.method)
        and bool(_ABOUT_DEVICES.search(one.last.said))
    )
