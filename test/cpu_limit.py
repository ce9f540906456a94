"""Fails a run if one of its tests costs much: the plugin behind pytest's option `--cpu-limit SECONDS`.

A test costs the CPU time of its process, and of all processes that descend from it, from the beginning of its set-up to
the end of its tear-down; and an equal part of what the fixtures of its class or module cost, `setUpClass` among them.
The run lists its costliest tests. It fails if a test costs more than TOLERANCE times the limit: seconds of CPU do not
grow while a test waits for a core, but other work makes caches cold, and machines differ.

Not counted: a test that is the first of its process to import large packages, and a process that goes on after the test
that started it.
"""

from __future__ import annotations

import os
import sys
from collections import Counter, defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

TOLERANCE = 2.0
# The tests that a run lists.
MOST_LISTED = 10
# Processes that descend from the process with this id, also when their parents have ended.
DESCENDS_FROM = "TEST_DESCENDS_FROM"
# In reports, the name of the property with a test's seconds.
PROPERTY = "cpu_seconds"
# The import of so many modules can be seen in what a test costs.
_MANY_MODULES = 20
_TICKS = os.sysconf("SC_CLK_TCK")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-limit",
        type=float,
        metavar="SECONDS",
        help="list the tests that cost most CPU, and fail if one costs clearly more than this",
    )


def start_measuring(config: pytest.Config) -> None:
    """Measure in each process that runs tests, if there is a limit. `CI_CPU_LIMIT` stands for the option."""
    if "CI_CPU_LIMIT" in os.environ:
        # Not for the runs that tests start.
        config.option.cpu_limit = float(os.environ.pop("CI_CPU_LIMIT"))
    if config.option.cpu_limit is None:
        return
    is_worker = hasattr(config, "workerinput")
    if is_worker or config.getoption("dist", "no") == "no":
        config.pluginmanager.register(Meter(), "cpu-meter")
    if not is_worker:
        config.pluginmanager.register(Judge(config.option.cpu_limit), "cpu-judge")


# By the id of a process: its own CPU time, and that of the children that it has reaped.
Clocks = dict[int, tuple[float, float]]


def spent(before: Clocks, now: Clocks) -> float:
    """The CPU time between two readings.

    What a process that began between them has computed itself counts once it has ended: a server that the first of
    several tests starts is not a cost of that test.
    """
    of_new = sum(own for pid, (own, _) in now.items() if pid not in before)
    return max(0.0, sum(map(sum, now.values())) - sum(map(sum, before.values())) - of_new)


class ProcessTree:
    """This process and all that descend from it."""

    def __init__(self) -> None:
        self._mark = f"{DESCENDS_FROM}={os.getpid()}".encode()
        os.environ[DESCENDS_FROM] = str(os.getpid())
        # By id: to read about each process of the machine takes time.
        self._is_ours: dict[int, bool] = {os.getpid(): True}

    def read(self) -> Clocks:
        """The CPU time of each living process: its own, and that of the children that it has reaped."""
        pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
        self._is_ours = {pid: self._is_ours[pid] for pid in pids if pid in self._is_ours}
        clocks = {}
        # A parent is older, and has a smaller id, until ids begin again.
        for pid in sorted(pids):
            if self._is_ours.get(pid, True) and (fields := _read_stat(pid)):
                parent = int(fields[1])
                user, system, reaped_user, reaped_system = (int(fields[n]) / _TICKS for n in (11, 12, 13, 14))
                if pid not in self._is_ours:
                    self._is_ours[pid] = self._is_ours.get(parent, False) or self._is_marked(pid)
                if self._is_ours[pid]:
                    clocks[pid] = (user + system, reaped_user + reaped_system)
        return clocks

    def _is_marked(self, pid: int) -> bool:
        try:
            return self._mark in Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
        except OSError:
            return False


def _read_stat(pid: int) -> list[str]:
    """What `/proc` says of a process, from its state on; empty if it has gone."""
    try:
        stat = Path("/proc", str(pid), "stat").read_text(errors="replace")
    except OSError:
        return []
    # The name of the program before it may contain spaces and brackets.
    return stat.rpartition(")")[2].split()


class Meter:
    """Writes the seconds of each test into its last report."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._tree = ProcessTree()
        self._tests: Counter[str] = Counter()
        # By class or module: what their fixtures have cost.
        self._shared: defaultdict[str, float] = defaultdict(float)
        self._shared_now = 0.0
        self._began: Clocks = {}
        self._modules = 0

    @property
    def _is_rank(self) -> bool:
        """Whether this is a rank, which was forked from the process and runs the test's item, too."""
        return os.getpid() != self._pid

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._tests.update(owner for item in session.items for owner in _owners(item))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, Any, Any]:
        self._shared_now, self._modules, self._began = 0.0, len(sys.modules), self._tree.read()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Generator[None, Any, Any]:
        if self._is_rank or fixturedef.scope not in ("class", "module"):
            return (yield)
        before = self._tree.read()
        try:
            return (yield)
        finally:
            seconds = spent(before, self._tree.read())
            self._shared_now += seconds
            self._shared[request.node.nodeid] += seconds

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Generator[None, Any, Any]:
        report = yield
        if call.when == "teardown" and not self._is_rank and len(sys.modules) - self._modules < _MANY_MODULES:
            own = max(0.0, spent(self._began, self._tree.read()) - self._shared_now)
            parts = (self._shared[owner] / self._tests[owner] for owner in _owners(item))
            report.user_properties.append((PROPERTY, f"{own + sum(parts):.2f}"))
        return report


def _owners(item: pytest.Item) -> list[str]:
    """The class and the module of a test, by their ids."""
    return [node.nodeid for node in item.listchain()[:-1] if isinstance(node, pytest.Class | pytest.Module)]


class Judge:
    """Lists the costliest tests, and fails the run if one costs too much."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, seconds in report.user_properties:
            if name == PROPERTY and report.when == "teardown" and report.passed:
                self._seconds[report.nodeid] = float(str(seconds))

    @property
    def _too_costly(self) -> list[str]:
        return [name for name, seconds in self._seconds.items() if seconds > TOLERANCE * self._limit]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._too_costly and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(wrapper=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Generator[None, Any, Any]:
        # Last, because .ci/run shows the end of the output where no test has failed.
        result = yield
        terminalreporter.section("tests that cost most CPU")
        costliest = sorted(self._seconds.items(), key=lambda row: -row[1])
        shown = max(MOST_LISTED, len(self._too_costly))
        for name, seconds in costliest[:shown]:
            terminalreporter.line(f"{seconds:6.2f}s {name}")
        if self._too_costly:
            terminalreporter.line(
                f"{len(self._too_costly)} tests cost more than {TOLERANCE * self._limit:g} s of CPU. "
                f"Make them cheaper than {self._limit:g} s, or mark them with @pytest.mark.slow."
            )
        return result
