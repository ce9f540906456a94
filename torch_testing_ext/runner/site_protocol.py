"""The protocol of a site, where a run finds devices and tests, and gets its engine.

`run_site` has this machine. The entry points `torchtest.sites` have the nodes of clusters: each is a function
of the options, the root of the project and the test files, and returns a context manager of a site.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from torch_testing_ext.runner.scheduling.inventory import Inventory
from torch_testing_ext.runner.scheduling.plan import Plan
from torch_testing_ext.runner.scheduling.protocol import RunLeases
from torch_testing_ext.runner.scheduling.unit_queue import Priority, Queue

from .events import Reporter
from .model import Attempt, RunHeader, Test
from .options import Options

if TYPE_CHECKING:
    from torch_testing_ext.runner.engine.engine import Engine
    from torch_testing_ext.runner.processes.file_processes import Discovery, Reads


@dataclass(frozen=True)
class Found:
    """The devices, slots and tests that a site has."""

    inventory: Inventory
    slots: int
    discovery: Discovery
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Work:
    """The result of discovery and planning, to run or to list."""

    # The options, with the number of slots.
    options: Options
    plan: Plan
    # Files that cannot be imported, and tests that cannot be run.
    broken: tuple[Attempt, ...]
    inventory: Inventory
    # All tests of the imported files, selected or not.
    discovered: tuple[Test, ...]
    warnings: tuple[str, ...]

    @property
    def tests(self) -> tuple[Test, ...]:
        return (*self.plan.tests, *(attempt.test for attempt in self.broken))


class RunSite(Protocol):
    """Finds devices and tests, and makes the engine that runs these."""

    @property
    def torch_version(self) -> str:
        """The version of torch there; empty before tests were found."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """All warnings so far."""

    def reads(self) -> Reads:
        """The files that tests and imports have read, as far as the site knows."""

    def discover(self, files: Sequence[str], reporter: Reporter) -> Found:
        """Import the files, and find the devices. Raises CannotRun."""

    def schedule(self, work: Work, first: Priority) -> tuple[Queue, RunLeases]:
        """A queue and leases for a forecast, which nothing else sees."""

    def engine(
        self, work: Work, first: Priority, reporter: Reporter, header: RunHeader
    ) -> tuple[Engine, tuple[str, ...]]:
        """The engine that runs the work, and warnings."""


OpenSite: TypeAlias = Callable[[Options, Path, Sequence[str]], AbstractContextManager[RunSite]]
