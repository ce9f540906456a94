"""What the tests of the runner's processes share: a root with test files of their own, run through one zygote."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch_testing_ext._process import system
from torch_testing_ext.runner import events
from torch_testing_ext.runner.engine.local import Engine
from torch_testing_ext.runner.model import Attempt, Summary, TestId
from torch_testing_ext.runner.options.options import Options
from torch_testing_ext.runner.processes.zygote import Zygote
from torch_testing_ext.runner.scheduling.inventory import Inventory
from torch_testing_ext.runner.scheduling.leases import Leases
from torch_testing_ext.runner.scheduling.plan import plan
from torch_testing_ext.runner.scheduling.policy import Queue

PRELOADED = ("torch", "torch.distributed", "torch_testing_ext.common_distributed")


class Heard:
    """A reporter that keeps what it hears, and does what it is told at events of its choice."""

    def __init__(self, react: Callable[[events.Event], object] | None = None):
        self.events: list[events.Event] = []
        self._react = react

    def on_event(self, event: events.Event) -> None:
        self.events.append(event)
        if self._react is not None:
            self._react(event)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


class Ran:
    """A run that is over, by the names of its tests."""

    def __init__(self, summary: Summary, heard: Heard):
        self.summary = summary
        self.heard = heard
        self.attempts: dict[str, list[Attempt]] = {}
        for settled in summary.finished:
            self.attempts[_short(settled.test.id)] = list(settled.attempts)
        self.outcomes = {_short(settled.test.id): settled.outcome.value for settled in summary.finished}

    def __getitem__(self, name: str) -> Attempt:
        return self.attempts[name][-1]


def _short(test: TestId) -> str:
    return test.method or test.file


class Project:
    """A directory with test files, and the zygote that runs them."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="torch_testing_ext_test_")).resolve()
        self.zygote = Zygote(self.root, PRELOADED).__enter__()
        self._files = 0

    def close(self) -> None:
        self.zygote.__exit__(None, None, None)
        shutil.rmtree(self.root)

    def write(self, source: str, name: str = "") -> str:
        self._files += 1
        name = name or f"test_{self._files}.py"
        (self.root / name).write_text(textwrap.dedent(source))
        return name

    def run(
        self, *files: str, react: Callable[[events.Event], object] | None = None, devices: int = 0, **options: Any
    ) -> Ran:
        """Everything in the files."""
        there = Inventory(tuple(map(str, range(devices))), fake=True) if devices else Inventory()
        chosen = Options(**{"jobs": 2, "timeout": 60.0, **options})
        discovery = self.zygote.discover(files, devices)
        planned = plan(discovery.tests, there, lambda test: None, chosen.repeat or 1)
        heard = Heard(react)
        queue = Queue(planned.units, devices, chosen.jobs)
        leases = Leases(there.names, chosen.jobs)
        engine = Engine(self.zygote, chosen, there, leases, queue, heard)
        summary = engine.run(planned, discovery.broken)
        while self.zygote._gone:
            self.zygote.loop.step()  # the processes of files are sent away when their tests are over
        assert leases.free_slots == chosen.jobs and leases.free_devices == devices, "a lease is still held"
        return Ran(summary, heard)


def descendants(pid: int) -> set[int]:
    below = system.children(pid)
    return {*below, *(deeper for child in below for deeper in descendants(child))}


def lives(pid: int) -> bool:
    """A zombie does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
