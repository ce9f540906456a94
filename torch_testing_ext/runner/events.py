"""The events of a run, which engines send and reporters receive.

An engine never prints; a reporter never asks an engine. Times are seconds since the start of the run unless a
comment says otherwise.
"""

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from .model import Attempt, FinishedTest, Lease, NodeOfRun, OmittedTest, RunHeader, Summary, Test, TestId, Unit


@dataclass(frozen=True)
class Importing:
    """Before the run starts: files are being imported; first of all torch, while `files` is empty."""

    files: tuple[str, ...]
    left: int  # how many are not imported yet
    total: int
    at: float = 0.0  # wall-clock time, in seconds since the epoch


@dataclass(frozen=True)
class Collected:
    """The tests were found, of which the options leave some out; before the run starts."""

    left_out: tuple[OmittedTest, ...]


@dataclass(frozen=True)
class RunBegan:
    """The run starts; nothing has run yet."""

    tests: tuple[Test, ...]  # tests to run, and tests already known to be skipped; each once, even if it is repeated
    units: tuple[Unit, ...]
    devices: tuple[str, ...]  # the inventory
    slots: int
    clock: float  # wall-clock time of the start, in seconds since the epoch
    seed: int | None = None  # the seed of the shuffled order
    fake: bool = False  # the devices do not exist
    repetitions: int = 1
    header: RunHeader = field(default_factory=RunHeader)
    nodes: tuple[NodeOfRun, ...] = ()  # the nodes of a cluster; none on this machine
    note: str = ""  # says what the options leave out

    @property
    def results(self) -> int:
        """The number of results to expect. A test that is in no unit does not run, so it is not repeated either."""
        planned = {test.id for unit in self.units for test in unit.tests}
        return sum(len(unit.tests) for unit in self.units) + sum(test.id not in planned for test in self.tests)


@dataclass(frozen=True)
class UnitBegan:
    """A unit has its lease, and its processes start."""

    unit: Unit
    lease: Lease
    at: float


@dataclass(frozen=True)
class TestBegan:
    """A test starts in a unit that is running."""

    __test__ = False  # not a test for pytest to collect

    test: Test
    unit: Unit
    lease: Lease
    at: float


@dataclass(frozen=True)
class TestIsSlow:
    """A running test has taken longer than the setting slow-after."""

    __test__ = False  # not a test for pytest to collect

    test: Test
    seconds: float
    lease: Lease


@dataclass(frozen=True)
class AttemptEnded:
    """A test has run once; a skipped test counts as one attempt."""

    attempt: Attempt
    retry: bool  # it failed and will be retried


@dataclass(frozen=True)
class TestFinished:
    """A test has its final result: it will not be retried."""

    __test__ = False  # not a test for pytest to collect

    finished: FinishedTest


@dataclass(frozen=True)
class UnitEnded:
    """All processes of the unit are gone, and its lease is free again."""

    unit: Unit
    lease: Lease
    at: float


@dataclass(frozen=True)
class Output:
    """With -s: new output of a test's process."""

    test: TestId | None
    text: str


@dataclass(frozen=True)
class Running:
    """A test that is running now, and where."""

    test: Test
    lease: Lease
    seconds: float
    stacks: str  # the stacks of the test's process and its ranks


@dataclass(frozen=True)
class StatusRequested:
    """The user asked what is running: SIGUSR1, or the key t."""

    running: tuple[Running, ...]


@dataclass(frozen=True)
class WaitingForDevices:
    """A unit waits for devices that other runs of this user have."""

    devices: tuple[str, ...]
    owners: tuple[str, ...]  # the runs that have the devices, in words


@dataclass(frozen=True)
class Warned:
    """A warning for the user."""

    text: str


@dataclass(frozen=True)
class Stopping:
    """No new units start: Ctrl-C, SIGTERM, --maxfail or --repeat=until-failure."""

    reason: str


@dataclass(frozen=True)
class RunEnded:
    """The run is over: the last event."""

    summary: Summary


Event: TypeAlias = (
    Importing
    | Collected
    | RunBegan
    | UnitBegan
    | TestBegan
    | TestIsSlow
    | AttemptEnded
    | TestFinished
    | UnitEnded
    | Output
    | StatusRequested
    | WaitingForDevices
    | Warned
    | Stopping
    | RunEnded
)


class Reporter(Protocol):
    """Anything that receives the events of a run."""

    def on_event(self, event: Event) -> None: ...


@dataclass(frozen=True)
class Reporters:
    """Passes every event to several reporters, in order. What one of them raises does not reach the others."""

    reporters: Sequence[Reporter]
    errors: list[str] = field(default_factory=list)  # the first traceback of each reporter that raised one
    _raised: set[int] = field(default_factory=set)

    def on_event(self, event: Event) -> None:
        for number, reporter in enumerate(self.reporters):
            try:
                reporter.on_event(event)
            except Exception:
                if number not in self._raised:
                    self._raised.add(number)
                    self.errors.append(traceback.format_exc())
