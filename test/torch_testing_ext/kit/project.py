"""A folder with test files, which run in forks of one preloaded server, without a process of run_test.py."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from kit.files import write
from kit.processes import files_not_kept
from kit.with_accelerators import FOLDER, environ_of_accelerators
from torch_testing_ext.runner import events
from torch_testing_ext.runner.engine.engine import Engine
from torch_testing_ext.runner.load_as import LoadAs
from torch_testing_ext.runner.model import Attempt, Summary, Test, TestId
from torch_testing_ext.runner.options import Options
from torch_testing_ext.runner.processes.file_processes import FileProcesses
from torch_testing_ext.runner.processes.preloaded_client import ALWAYS, WarmUp
from torch_testing_ext.runner.run_site import LocalSite
from torch_testing_ext.runner.scheduling.inventory import Inventory
from torch_testing_ext.runner.scheduling.leases import Leases
from torch_testing_ext.runner.scheduling.plan import plan
from torch_testing_ext.runner.scheduling.unit_queue import Queue


class EventRecorder:
    """A reporter that keeps all events and passes each to `react`."""

    def __init__(self, react: Callable[[events.Event], object] | None = None):
        self.events: list[events.Event] = []
        self._react = react

    def on_event(self, event: events.Event) -> None:
        self.events.append(event)
        if self._react is not None:
            self._react(event)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


class FinishedRun:
    """The results of a run, by name of test; `by_id` has the names with their classes."""

    def __init__(self, summary: Summary, recorder: EventRecorder):
        self.summary = summary
        self.recorder = recorder
        self.attempts: dict[str, list[Attempt]] = {}
        for finished in summary.finished:
            self.attempts[_short(finished.test.id)] = list(finished.attempts)
        self.by_id = {str(finished.test.id): finished.outcome.value for finished in summary.finished}
        assert len(self.by_id) == len({(one.test.id, one.last.repetition) for one in summary.finished}) or any(
            one.last.repetition for one in summary.finished
        )
        self.outcomes = {_short(finished.test.id): finished.outcome.value for finished in summary.finished}

    def __getitem__(self, name: str) -> Attempt:
        return self.attempts[name][-1]


def _short(test: TestId) -> str:
    return test.method or test.file


class Project:
    """A folder with test files, and the preloaded server for them."""

    def __init__(
        self,
        root: Path | None = None,
        preloaded: Sequence[str] = (),
        drop_in: bool = False,
        accelerators: int = 0,
        by_pytest: bool = True,
    ) -> None:
        """`accelerators`: how many of Python there are (`kit.with_accelerators`). `by_pytest`: not by unittest."""
        self.root = root or Path(tempfile.mkdtemp(prefix="torch_testing_ext_test_")).resolve()
        # Files of tests are few and small: what collapsing saves with each fork is less than it takes.
        warm_up = WarmUp((*ALWAYS, *preloaded), collapse=False)
        environ = environ_of_accelerators(accelerators) if accelerators else {}
        # The server gets the path of this process, not that of PYTHONPATH.
        path = [*sys.path, str(FOLDER)] if accelerators else sys.path
        with mock.patch.object(sys, "path", path):
            self.preloaded_server = FileProcesses(
                self.root, warm_up, drop_in, environ, load_as=LoadAs(by_pytest)
            ).__enter__()
        self._files = 0

    @classmethod
    @contextlib.contextmanager
    def beside(
        cls, other: Project, *preloaded: str, drop_in: bool = False, by_pytest: bool = True
    ) -> Iterator[Project]:
        """The same folder with a preloaded server of its own, which gets the environment of now."""
        project = cls(other.root, preloaded, drop_in, by_pytest=by_pytest)
        try:
            yield project
        finally:
            project.preloaded_server.__exit__(None, None, None)

    def close(self) -> None:
        self.preloaded_server.__exit__(None, None, None)
        shutil.rmtree(self.root)

    def write(self, source: str, name: str = "") -> str:
        self._files += 1
        name = name or f"test_{self._files}.py"
        write(self.root, name, source)
        return name

    def run(
        self, *files: str, react: Callable[[events.Event], object] | None = None, devices: int = 0, **options: Any
    ) -> FinishedRun:
        """Runs all tests of the files."""
        discovery = self.preloaded_server.discover(files, devices)
        not_run = (*discovery.broken, *discovery.not_run)
        return self.run_tests_of(discovery.tests, not_run, react, devices, **options)

    def run_tests_of(
        self,
        tests: Sequence[Test],
        not_run: Sequence[Attempt] = (),
        react: Callable[[events.Event], object] | None = None,
        devices: int = 0,
        inventory: Inventory | None = None,
        **options: Any,
    ) -> FinishedRun:
        """Runs tests that were discovered before. `devices`: how many that do not exist; `inventory`: those that do."""
        if inventory is None:
            inventory = Inventory(tuple(map(str, range(devices))), fake=True) if devices else Inventory()
        chosen = Options(**{"jobs": 2, "timeout": 60.0, **options})
        planned = plan(tests, inventory, lambda test: None, chosen.repetitions)
        recorder = EventRecorder(react)
        leases = Leases(inventory.names, chosen.jobs)
        queue = Queue(planned.units, leases)
        engine = Engine(LocalSite(chosen, self.preloaded_server, inventory), chosen, inventory, leases, queue, recorder)
        with files_not_kept():
            summary = engine.run(planned, not_run)
        for file in self.preloaded_server._files.values():
            file.close()  # the process of a file without tests has not ended yet
        while self.preloaded_server.children:
            self.preloaded_server.loop.step()
        assert leases.free_slots == chosen.jobs and leases.free_devices == len(inventory.names), "a lease is still held"
        return FinishedRun(summary, recorder)
