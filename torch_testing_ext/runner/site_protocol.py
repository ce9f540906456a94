"""The protocol of a site, where a run finds devices and tests, and where its units run.

The seam between the engine, which decides, and the processes. `run_site` has this machine. The entry points
`torchtest.sites` have the nodes of clusters: each is a function of the options, the root of the project and the test
files, and returns a context manager of a site.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from torch_testing_ext._process.event_loop import EventLoop
from torch_testing_ext.runner.scheduling.inventory import Inventory
from torch_testing_ext.runner.scheduling.plan import Plan
from torch_testing_ext.runner.scheduling.protocol import RunLeases
from torch_testing_ext.runner.scheduling.unit_queue import Queue

from .events import Reporter
from .model import Attempt, Lease, OmittedTest, Test, Unit
from .options import Options

if TYPE_CHECKING:
    from torch_testing_ext.runner.engine.memory_return import MemoryReturn
    from torch_testing_ext.runner.engine.other_runs import OtherRuns
    from torch_testing_ext.runner.engine.running_unit import UnitHandle, UnitListener
    from torch_testing_ext.runner.load_as import FilesFound
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
    # What the options leave out.
    left_out: tuple[OmittedTest, ...] = ()
    # Whether other shards have all tests that are selected.
    is_empty_shard: bool = False

    @property
    def tests(self) -> tuple[Test, ...]:
        return (*self.plan.tests, *(attempt.test for attempt in self.broken))


@dataclass(frozen=True)
class Preparation:
    """Additions of a site to the engine of a run: checks of its devices, and warnings."""

    # Waits until devices have their memory back.
    memory: MemoryReturn | None = None
    # The runs that share its devices.
    others: OtherRuns | None = None
    warnings: tuple[str, ...] = ()


class RunSite(Protocol):
    """Finds devices and tests, starts units, and owns their processes. What has a body here is the usual."""

    @property
    def loop(self) -> EventLoop:
        """The loop in which the engine waits."""

    @property
    def torch_version(self) -> str:
        """The version of torch there; empty before tests were found."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """All warnings so far."""

    def reads(self) -> Reads:
        """The files that tests and imports have read, as far as the site knows."""
        return {}

    def find_files(self, importing: Sequence[str] = ()) -> FilesFound:
        """Ask pytest which files it collects; meanwhile, a site may import files that are probably chosen.

        Raises CannotRun.
        """

    def discover(self, files: Sequence[str], reporter: Reporter) -> Found:
        """Import the files, and find the devices. Raises CannotRun."""

    def leases(self, work: Work) -> RunLeases:
        """The devices and slots of the site, all of them free."""

    def prepare(self, work: Work, queue: Queue, leases: RunLeases, reporter: Reporter) -> Preparation:
        """Get ready to run the units of a queue."""
        return Preparation()

    def start(self, unit: Unit, lease: Lease, listener: UnitListener) -> UnitHandle:
        """Start a unit. Raises OSError if the system refuses what it needs."""

    def close_file(self, name: str) -> None:
        """End the process of a file, of which no unit runs or waits."""

    def wait_for_more(self) -> bool:
        """No unit runs, and none that waits fits: whether this can change, so that waiting makes sense."""
        return False

    @property
    def shortage(self) -> str:
        """Why units that wait fit nowhere, in words."""
        return "it does not fit on this machine"

    def is_finishing(self) -> bool:
        """The last unit has ended: whether something else is still to come, such as files from other machines."""
        return False

    def hurry(self) -> None:
        """The user has interrupted the run twice: wait for nothing that may not come."""
        return


OpenSite: TypeAlias = Callable[[Options, Path, Sequence[str]], AbstractContextManager[RunSite]]
