"""What happens in a run, as an engine tells it and reporters hear it.

An engine never prints; a reporter never asks an engine. Times are seconds since the run began, unless they say else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from .model import Attempt, FinishedTest, Lease, Summary, Test, TestId, Unit


@dataclass(frozen=True)
class RunBegan:
    tests: tuple[Test, ...]  # what will run, or be skipped as known before; each once, however often it is repeated
    units: tuple[Unit, ...]
    devices: tuple[str, ...]  # the inventory
    slots: int
    clock: float  # wall-clock time of the beginning, in seconds since the epoch
    seed: int | None = None  # of the shuffled order
    fake: bool = False  # the devices do not exist
    repetitions: int = 1

    @property
    def results(self) -> int:
        """How many will be settled: what is not in a unit need not run, and is not repeated."""
        planned = {test.id for unit in self.units for test in unit.tests}
        return sum(len(unit.tests) for unit in self.units) + sum(test.id not in planned for test in self.tests)


@dataclass(frozen=True)
class UnitBegan:
    unit: Unit
    lease: Lease
    at: float


@dataclass(frozen=True)
class TestBegan:
    __test__ = False  # nothing for pytest to collect

    test: Test
    unit: Unit
    lease: Lease
    at: float


@dataclass(frozen=True)
class TestIsSlow:
    __test__ = False  # nothing for pytest to collect

    test: Test
    seconds: float
    lease: Lease


@dataclass(frozen=True)
class AttemptEnded:
    __test__ = False  # nothing for pytest to collect

    attempt: Attempt
    again: bool  # it failed and will be tried once more


@dataclass(frozen=True)
class TestFinished:
    __test__ = False  # nothing for pytest to collect

    settled: FinishedTest


@dataclass(frozen=True)
class UnitEnded:
    """All its processes are gone and its lease is given back."""

    unit: Unit
    lease: Lease
    at: float


@dataclass(frozen=True)
class Output:
    """With -s: what a test's process printed just now."""

    test: TestId | None
    text: str


@dataclass(frozen=True)
class Running:
    test: Test
    lease: Lease
    seconds: float
    stacks: str  # of its process and its ranks


@dataclass(frozen=True)
class StatusRequested:
    """Somebody asked what is running (SIGUSR1, or the key t)."""

    running: tuple[Running, ...]


@dataclass(frozen=True)
class Warned:
    text: str


@dataclass(frozen=True)
class Stopping:
    """No new units begin: Ctrl-C, SIGTERM or --max-fail."""

    reason: str


@dataclass(frozen=True)
class RunEnded:
    summary: Summary


Event: TypeAlias = (
    RunBegan
    | UnitBegan
    | TestBegan
    | TestIsSlow
    | AttemptEnded
    | TestFinished
    | UnitEnded
    | Output
    | StatusRequested
    | Warned
    | Stopping
    | RunEnded
)


class Reporter(Protocol):
    def on_event(self, event: Event) -> None: ...


@dataclass(frozen=True)
class Reporters:
    """Several reporters as one."""

    reporters: Sequence[Reporter]

    def on_event(self, event: Event) -> None:
        for reporter in self.reporters:
            reporter.on_event(event)
