"""Runs over agents that this machine starts itself: pretended nodes, each a process at the other end of a socket."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from socket import socket
from typing import Any

from kit.files import write
from kit.processes import clean_environ
from kit.project import EventRecorder, FinishedRun
from kit.warm import start_agent
from torch_testing_ext._process.channels import socket_pair
from torch_testing_ext.runner import events
from torch_testing_ext.runner.cluster.agent_messages import PrepareNode
from torch_testing_ext.runner.cluster.cluster_site import ClusterSite
from torch_testing_ext.runner.cluster.slurm_allocation import CommandLauncher
from torch_testing_ext.runner.engine.engine import Engine
from torch_testing_ext.runner.load_as import LoadAs
from torch_testing_ext.runner.model import NodeOfRun
from torch_testing_ext.runner.options import Options
from torch_testing_ext.runner.scheduling.inventory import Inventory
from torch_testing_ext.runner.scheduling.node_leases import NodeLeases
from torch_testing_ext.runner.scheduling.plan import plan
from torch_testing_ext.runner.scheduling.unit_queue import Queue

AGENT = (sys.executable, "-m", "torch_testing_ext.runner.cluster.agent")


class WarmLauncher(CommandLauncher):
    """Starts the usual agents in forks that have imported torch."""

    def _start(self, name: str, command: Sequence[str]) -> socket:
        if tuple(command) != AGENT:
            return super()._start(name, command)
        ours, theirs = socket_pair()
        with theirs, self._log(name).open("wb") as log:
            self._processes[name] = start_agent(theirs, log, self.environ)  # type: ignore[assignment]
        return ours


def prepare_for(root: Path, **more: Any) -> PrepareNode:
    chosen: dict[str, Any] = {
        "jobs": 2,
        "fake_devices": (),
        "command": "python run_test.py",
        "environ": {},
    }
    fields = {field.name for field in dataclasses.fields(PrepareNode)}
    options = {name: value for name, value in more.items() if name not in fields}
    more = {name: value for name, value in more.items() if name in fields}
    given = Options(**{"timeout": 60.0, **options})
    return PrepareNode(str(root), given, **{**chosen, "load_as": LoadAs(all_marks=bool(given.marks)), **more})


class Nodes:
    """A project folder, and agents for it on pretended nodes: `with Nodes("a", "b") as nodes:`."""

    def __init__(self, *names: str, timeout: float = 60.0, command: Sequence[str] = AGENT, **prepare: Any) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="torch_testing_ext_test_")).resolve()
        self.logs = self.root / "logs"
        self.logs.mkdir()
        self.launcher = WarmLauncher(
            dict.fromkeys(names, command),
            prepare_for(self.root, **prepare),
            self.logs,
            clean_environ(),
        )
        self.leases = NodeLeases()
        self.said: list[str] = []
        self.place = ClusterSite(self.launcher, self.leases, timeout, self.said.append)
        self.place.nodes.troubles.show = self.said.append
        self._files = 0

    def __enter__(self) -> Nodes:
        self.place.__enter__()
        try:
            self.place.wait_for_nodes()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.place.__exit__()
        shutil.rmtree(self.root)

    def write(self, source: str, name: str = "") -> str:
        self._files += 1
        name = name or f"test_{self._files}.py"
        write(self.root, name, source)
        return name

    def pid(self, name: str) -> int:
        """The agent of a node."""
        return self.launcher._processes[name].pid

    def run(self, *files: str, react: Callable[[events.Event], object] | None = None, **options: Any) -> FinishedRun:
        found = self.place.find_tests(files, 2)
        chosen = Options(**{"jobs": 2, "timeout": 60.0, **options})
        most = self.place.most_at_once
        here = self.place.nodes.ready.items()
        inventory = Inventory(
            tuple(map(str, range(most))),
            fake=True,
            nodes=tuple(NodeOfRun(name, node.devices, node.slots, node.most_at_once) for name, node in here),
        )
        planned = plan(found.tests, inventory, lambda test: None, chosen.repetitions)
        recorder = EventRecorder(react)
        queue = Queue(planned.units, self.leases)
        engine = Engine(self.place, chosen, inventory, self.leases, queue, recorder)
        summary = engine.run(planned, (*found.broken, *found.not_run))
        return FinishedRun(summary, recorder)

    @property
    def is_free(self) -> bool:
        """Whether nothing is leased any more."""
        return not any(node.leases._held for node in self.leases._nodes.values())
