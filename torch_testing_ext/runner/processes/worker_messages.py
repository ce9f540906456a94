"""The messages of a worker. A test is identified by its index in the unit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torch_testing_ext._collectives.failure import FailureView
from torch_testing_ext.runner.model import TestEnd

from .fork_parent_messages import PreloadModules


@dataclass(frozen=True)
class Began:
    """A test begins. `printed`: the length of the worker's log."""

    test: int
    at: float
    printed: int


@dataclass(frozen=True)
class Ended:
    """A test has ended. `ranks`: the directories of the ranks that it started."""

    test: int
    at: float
    end: TestEnd
    printed: int
    ranks: tuple[str, ...]


@dataclass(frozen=True)
class NotRun:
    """A test was left out: a class or module fixture that it needs failed or skips, or it is not in the file."""

    test: int
    at: float
    end: TestEnd


@dataclass(frozen=True)
class FailedSoFar:
    """The running test has failed already; its tear-down is still to come."""

    test: int
    end: TestEnd


@dataclass(frozen=True)
class FixtureBegan:
    """A class or module fixture begins: `setUpClass (module.T)`. `tests`: those that cannot run without it."""

    name: str
    at: float
    tests: tuple[int, ...]


@dataclass(frozen=True)
class FixtureEnded:
    """The fixture that was running has returned or raised. `leftovers`: what ranks that ended in it left running."""

    leftovers: tuple[str, ...] = ()


@dataclass(frozen=True)
class FixtureFailed:
    """A class or module tear-down failed. A set-up that fails is reported by NotRun."""

    failure: FailureView


@dataclass(frozen=True)
class AllOver:
    """Every test and fixture is over. A worker that has not sent this did not end properly, whatever its exit code."""

    leftovers: tuple[str, ...] = ()  # what ranks that ended after the last test left running


@dataclass(frozen=True)
class WorkerBroke:
    """An exception that unittest let through: KeyboardInterrupt, or an error of ours."""

    message: str


FromWorker: TypeAlias = (
    Began
    | FailedSoFar
    | Ended
    | NotRun
    | FixtureBegan
    | FixtureEnded
    | FixtureFailed
    | AllOver
    | WorkerBroke
    | PreloadModules
)
