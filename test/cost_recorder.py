"""Records what each test costs, in seconds of CPU: the plugin behind pytest's option `--record-costs FILE`.

A test costs what its process and all processes that descend from it compute between the beginning of its set-up and
the end of its tear-down. This is read from `/proc`: a living process counts for itself and for the children that it
has reaped. Ranks are children of a fork server, and programs are children of a warm server; both reap them, so they
count, too. A process that has lost its parent is known by a variable that it has inherited.

The first test that needs a module pays for its import, unless it was imported while tests were collected.

Not counted:
- the start of a server that outlives the test which happened to start it: what the server does for tests does count
- a process that loses its parent, begins and ends within one test
- a child whose parent ignores SIGCHLD: Linux then forgets what it has computed
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

# Processes that descend from the process with this id.
DESCENDS_FROM = "TEST_COSTS_OF"
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
        self._before: dict[Identity, Process] = {}
        self._before = self._living()

    def _living(self) -> dict[Identity, Process]:
        """All living processes of the tree."""
        pids = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        self._strangers &= pids
        processes = {pid: process for pid in pids - self._strangers if (process := read_process(pid))}
        own = {os.getpid(), *(pid for pid, process in processes.items() if (pid, process.began) in self._before)}
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
        """What the tree has computed since the last call."""
        before, now = self._before, self._living()
        self._before = now
        ticks = 0
        for identity, process in now.items():
            if identity in before:
                ticks += process.own + process.reaped - before[identity].own - before[identity].reaped
            else:
                ticks += process.reaped
        pids = {pid for pid, _ in before}
        for identity, process in before.items():
            # A parent of the tree has reaped it, and counts all that it has computed. Nobody does for an orphan.
            if identity not in now and process.parent in pids:
                ticks -= process.own + process.reaped
        return max(0.0, ticks / _TICKS)


class CostRecorder:
    """Appends a line to a file for each test: its seconds, its outcome, its id."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._pid = os.getpid()
        self._tree = ProcessTree()
        self._outcome = "passed"

    def pytest_collection_finish(self) -> None:
        """Import what nearly every test needs, so that the first one does not pay for it."""
        import torch.distributed  # noqa: F401

        from torch_testing_ext import launch  # noqa: F401

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        # A rank that was forked from this process runs the test's item, too.
        if os.getpid() != self._pid:
            yield
            return
        self._tree.seconds_since()
        self._outcome = "passed"
        yield
        if os.getpid() != self._pid:
            return
        line = f"{self._tree.seconds_since():.2f}\t{self._outcome}\t{item.nodeid}\n"
        # Workers append to one file: a line is one call.
        with open(self._file, "ab", buffering=0) as file:
            file.write(line.encode())

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed" and self._outcome != "failed":
            self._outcome = report.outcome


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
