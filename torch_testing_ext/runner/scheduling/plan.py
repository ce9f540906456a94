"""The plan of a run: units to run and tests to skip."""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch_testing_ext._machine.device_needs import for_backend, why_not
from torch_testing_ext._process.words import count, grouped, in_bytes
from torch_testing_ext.runner.model import Test, TestId, Unit
from torch_testing_ext.runner.options import Options

from .inventory import Inventory
from .unit_queue import Priority, no_preference

# Seconds that every unit takes in addition to its tests: even a thousand empty tests take time.
OVERHEAD = 0.05


ExpectedSeconds = Callable[[TestId], float | None]
TimedGroup = tuple[float, list[Test]]


@dataclass(frozen=True)
class Plan:
    """The units of a run, and the tests that it skips without running them."""

    units: tuple[Unit, ...]
    # The tests that are skipped, with their reasons.
    skipped: tuple[Test, ...]
    # The tests that no known run has: a retry would hide that one of them fails now and then.
    new: frozenset[TestId] = frozenset()

    @property
    def tests(self) -> tuple[Test, ...]:
        """All tests, each once even if it is repeated."""

        def place(test: Test) -> tuple[str, int, TestId]:
            return test.id.file, test.line, test.id

        tests = list(self.skipped)
        for unit in self.units:
            if unit.repetition == 0:
                tests += unit.tests
        return tuple(sorted(tests, key=place))


def plan(
    tests: Iterable[Test],
    inventory: Inventory,
    expected: ExpectedSeconds,
    repetitions: int = 1,
    new: frozenset[TestId] = frozenset(),
    of_new: int = 0,
) -> Plan:
    """Groups the tests into units, and skips tests that need more devices than there are.

    `of_new`: repetitions of those that are `new`.
    """
    wanted = []
    skipped = []
    for test in tests:
        test = _with_devices_of(inventory, test)
        if test.skip is None:
            wanted.append(test)
        else:
            skipped.append(test)
    groups = []
    for group in group_by_fixtures(wanted):
        groups += _fitting(group, inventory)
    units: list[Unit] = []
    for repetition in range(max(repetitions, of_new if new else 0)):
        if repetition == repetitions:
            groups = [group for tests in groups if (group := [test for test in tests if test.id in new])]
        for group in groups:
            seconds = seconds_of_group(group, expected)
            units.append(Unit(len(units), tuple(group), repetition, seconds=seconds))
    return Plan(tuple(units), tuple(skipped), new)


def _with_devices_of(inventory: Inventory, test: Test) -> Test:
    """The test with devices that its ranks share if there are too few; skipped if no devices have what it needs."""
    if test.skip is not None or not test.devices:
        return test
    if test.devices > inventory.most_at_once:
        # Ranks on one device have no connection.
        needs_connection = test.of_devices.of_several
        most_shared = min(inventory.most_ranks, test.world_size)
        if test.devices > most_shared or needs_connection:
            return _skipped_for_devices(test, inventory)
        test = dataclasses.replace(test, devices=inventory.most_at_once, shared_by=test.devices)
    if not test.of_devices or inventory.fake:
        return test
    why = why_not(inventory.facts, test.of_devices, test.devices)
    if why is None:
        return test
    want = f"{count(test.devices, 'device')} with {test.of_devices}"
    return dataclasses.replace(test, skip=f"needs {want}: {why}", want=want)


def _fitting(group: list[Test], inventory: Inventory) -> list[list[Test]]:
    """The group, or each test by itself if no devices have what all of them need together."""
    unit = Unit(0, tuple(group))
    if inventory.fake or not unit.of_devices:
        return [group]
    if why_not(inventory.facts, unit.of_devices, unit.devices):
        return [[test] for test in group]
    return [group]


def _skipped_for_devices(test: Test, inventory: Inventory) -> Test:
    """The test, skipped with the number of devices that it wants and that there are."""
    want = f"{count(test.devices, 'device')}{for_backend(test.backend)}"
    available = f"{inventory.most_at_once} available"
    if len(inventory.nodes) > 1:
        available += " on one node"
    if inventory.ranks_per_device > 1 and inventory.most_at_once:
        if test.devices > test.world_size:
            processes = "process" if test.world_size == 1 else "processes"
            available += f", for {test.world_size} {processes}"
        else:
            available += f", for at most {inventory.most_ranks} ranks"
    return dataclasses.replace(test, skip=f"needs {want}, {available}", want=want)


def group_by_fixtures(tests: Iterable[Test]) -> Iterator[list[Test]]:
    """Groups tests that share class fixtures. Groups are in the order of their first tests."""

    def key(test: Test) -> object:
        if not test.together:
            return test.id
        return test.id.file, test.together

    groups = grouped((key(test), test) for test in tests)
    return iter(groups.values())


def seconds_of_group(tests: Sequence[Test], expected: ExpectedSeconds) -> float | None:
    """The expected duration of a group. Tests of unknown duration count as the average of the others."""
    known = []
    for test in tests:
        seconds = expected(test.id)
        if seconds is not None:
            known.append(seconds)
    if not known:
        return None
    average = sum(known) / len(known)
    return average * len(tests)


def longest_first(timed: TimedGroup) -> tuple[float, TestId]:
    """By their names if they take as long."""
    seconds, group = timed
    return -seconds, group[0].id


def priority(options: Options) -> Priority:
    """The units that start before others regardless of their size, by --shuffle."""

    def shuffled(unit: Unit) -> bytes:
        # Depends only on the seed and the unit, so that leaving out a test does not reorder the others.
        first = unit.tests[0]
        name = f"{options.shuffle} {unit.repetition} {first.id}"
        return hashlib.sha256(in_bytes(name)).digest()

    if options.shuffle is not None:
        return shuffled
    return no_preference
