"""Records what each test costs, in seconds of CPU: the plugin behind pytest's option `--record-costs FILE`.

A test costs what its process and all processes that descend from it compute between the beginning of its set-up and
the end of its tear-down. This is read from `/proc`: a living process counts for itself and for the children that it
has reaped. Ranks are children of a fork server, and programs are children of a warm server; both reap them, so they
count, too. A process that has lost its parent is known by a variable that it has inherited.

What the tests of a class or module share (`setUpClass`, `setUpModule`, fixtures of that scope, and their ends) is
recorded as a row of the class or module, not as a cost of the test that happens to come first.

The first test that imports a package pays for that. A test during which many modules of installed packages were
imported is recorded as `importing`, not as `passed`.

Not counted:
- fixtures of the whole session
- the start of a server that outlives the test which happened to start it: what the server does for tests does count
- a process that loses its parent, begins and ends within one test
- a child whose parent ignores SIGCHLD: Linux then forgets what it has computed
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

# Processes that descend from the process with this id.
DESCENDS_FROM = "TEST_COSTS_OF"
# In place of a test's name, in the row of what the tests of a class or module share.
SHARED = "(shared)"
# The import of so many modules can be seen in what a test costs.
MANY_MODULES = 20
_TICKS = os.sysconf("SC_CLK_TCK")


class Process(NamedTuple):
    """What `/proc/PID/stat` says of a process. Times are in clock ticks."""

    parent: int
    # The time of its start: an id may be used again.
    began: int
    own: int
    reaped: int


Identity = tuple[int, int]


def read_process(pid: int | str) -> Process | None:
    """The process with this id, unless it has gone."""
    try:
        stat = Path("/proc", str(pid), "stat").read_text(errors="replace")
    except OSError:
        return None
    # The name of the program before it may contain spaces and brackets.
    fields = stat.rpartition(")")[2].split()
    parent, user, system, reaped_user, reaped_system, began = (int(fields[field]) for field in (1, 11, 12, 13, 14, 19))
    return Process(parent, began, user + system, reaped_user + reaped_system)


class ProcessTree:
    """This process and those that descend from it, also by way of a process that has ended."""

    def __init__(self) -> None:
        self._mark = f"{DESCENDS_FROM}={os.getpid()}".encode()
        os.environ[DESCENDS_FROM] = str(os.getpid())
        # Processes of others, by their ids alone: to read what `/proc` says of each takes time.
        self._strangers: set[int] = set()
        # The living processes, with the ticks of each that have been counted.
        self._counted: dict[Identity, int] = {}
        self._parents: dict[Identity, int] = {}
        # Those that were there before the test.
        self._old: set[Identity] = set()
        self.begin()

    def begin(self) -> None:
        """A test begins: what the living processes have computed so far does not count."""
        now = self._living()
        self._counted = {identity: process.own + process.reaped for identity, process in now.items()}
        self._parents = {identity: process.parent for identity, process in now.items()}
        self._old = set(now)

    def _living(self) -> dict[Identity, Process]:
        """All living processes of the tree."""
        pids = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        self._strangers &= pids
        processes = {pid: process for pid in pids - self._strangers if (process := read_process(pid))}
        own = {os.getpid(), *(pid for pid, process in processes.items() if (pid, process.began) in self._counted)}
        for pid in sorted(processes):
            line = []
            ancestor = pid
            while ancestor in processes and ancestor not in own and ancestor not in line:
                line.append(ancestor)
                ancestor = processes[ancestor].parent
            if ancestor in own:
                own.update(line)
            elif self._is_marked(pid):
                own.add(pid)
            else:
                self._strangers.add(pid)
        # A marked process that was looked at after its children.
        self._strangers -= own
        return {(pid, process.began): process for pid, process in processes.items() if pid in own}

    def _is_marked(self, pid: int) -> bool:
        try:
            return self._mark in Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
        except OSError:
            return False

    def seconds_since(self) -> float:
        """What the tree has computed since the last call, or since the test began."""
        now = self._living()
        before, self._counted = self._counted, {}
        ticks = 0
        for identity, process in now.items():
            # The start of a process that may outlive the test does not count, only what it has reaped.
            total = process.own + process.reaped if identity in self._old else process.reaped
            self._counted[identity] = total
            ticks += total - before.get(identity, 0)
        # A process of the tree has reaped those that have gone, and counts all that they have computed. That includes
        # what has been counted already. Nobody reaps an orphan for the tree.
        pids = {pid for pid, _ in before}
        ticks -= sum(before[identity] for identity in before.keys() - now.keys() if self._parents.get(identity) in pids)
        self._parents = {identity: process.parent for identity, process in now.items()}
        return max(0.0, ticks / _TICKS)


class CostRecorder:
    """Appends a line to a file for each test, and for what each class or module shares: seconds, outcome, id."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._pid = os.getpid()
        self._tree = ProcessTree()
        # Who pays now: the id of a test, or the row of a class or module. Inner ones are last.
        self._payers: list[str] = []
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._outcome = "passed"
        self._rows_to_end: list[str] = []

    def pytest_collection_finish(self) -> None:
        """Import what nearly every test needs, so that the first one does not pay for it."""
        import torch.distributed  # noqa: F401

        from torch_testing_ext import launch  # noqa: F401

    @property
    def _is_rank(self) -> bool:
        """A rank that was forked from this process runs the test's item, too."""
        return os.getpid() != self._pid

    @contextlib.contextmanager
    def _pays(self, payer: str) -> Iterator[None]:
        """What is computed meanwhile counts for this row."""
        self._charge()
        self._payers.append(payer)
        try:
            yield
        finally:
            if not self._is_rank:
                self._charge()
                self._payers.pop()

    def _charge(self) -> None:
        seconds = self._tree.seconds_since()
        if self._payers:
            self._seconds[self._payers[-1]] += seconds

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if self._is_rank:
            yield
            return
        modules = set(sys.modules)
        self._outcome = "passed"
        self._tree.begin()
        with self._pays(item.nodeid):
            yield
        if self._is_rank:
            return
        if self._outcome == "passed" and count_installed(set(sys.modules) - modules) >= MANY_MODULES:
            self._outcome = "importing"
        self._write(self._outcome, item.nodeid)
        for row in self._rows_to_end:
            self._write("passed", row)
        self._rows_to_end.clear()

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[None]:
        if self._is_rank or fixturedef.scope == "function":
            yield
            return
        with self._pays(shared_row(request.node)):
            yield

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        """A class or module ends with its last test, and pays for what that one does in its tear-down."""
        goes_on = nextitem.listchain() if nextitem else []
        ending = [shared_row(node) for node in item.listchain()[:-1] if node not in goes_on]
        rows = [row for row in ending if row and row in self._seconds]
        if self._is_rank or not rows:
            yield
            return
        self._rows_to_end += rows
        with self._pays(rows[-1]):
            yield

    def _write(self, outcome: str, row: str) -> None:
        seconds = self._seconds.pop(row)
        # Workers append to one file: a line is one call.
        with open(self._file, "ab", buffering=0) as file:
            file.write(f"{seconds:.2f}\t{outcome}\t{row}\n".encode())

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed" and self._outcome != "failed":
            self._outcome = report.outcome


def shared_row(node: Any) -> str:
    """The row of what the tests of a class or module share; empty for wider ones."""
    return f"{node.nodeid}::{SHARED}" if isinstance(node, pytest.Class | pytest.Module) else ""


def count_installed(names: Iterable[str]) -> int:
    """How many of these modules are of installed packages."""
    specs = (getattr(sys.modules[name], "__spec__", None) for name in names if name in sys.modules)
    return sum("site-packages" in (getattr(spec, "origin", None) or "") for spec in specs)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-costs", metavar="FILE", help="write the CPU seconds of each test to a file (test/tiers.py)"
    )


class WorkersRecord:
    """Tells the workers of pytest-xdist where to record."""

    def __init__(self, file: Path) -> None:
        self._file = file

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["record_costs"] = str(self._file)


def start_recording(config: pytest.Config) -> None:
    """Record in each process that runs tests, if the option is given. `CI_COSTS` stands for the option."""
    worker_input = getattr(config, "workerinput", None)
    if worker_input is not None:
        if "record_costs" in worker_input:
            config.pluginmanager.register(CostRecorder(Path(worker_input["record_costs"])), "cost-recorder")
        return
    chosen = os.environ.pop("CI_COSTS", "") or config.option.record_costs
    if not chosen:
        return
    # Workers and tests may have another current directory.
    file = Path(chosen).absolute()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"")
    distributes = config.getoption("dist", "no") != "no"
    plugin = WorkersRecord(file) if distributes else CostRecorder(file)
    config.pluginmanager.register(plugin, "cost-recorder")
