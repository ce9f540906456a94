"""The nodes of a cluster as the place where units run. It knows no Ray and no Slurm: a launcher starts the agents."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch_testing_ext._process.loop import EventLoop, Timer

from ..engine.place import LostUnitListener
from ..model import Lease, Unit
from ..options.options import CannotRun, UsageError
from ..processes.file_processes import Discovery
from ..scheduling.node_leases import NodeLeases
from .agent_messages import (
    HEARTBEAT,
    AgentHello,
    CloseFile,
    FindTests,
    NodeFacts,
    NodeReady,
    PrepareNode,
    RunUnit,
    TestsFound,
)
from .facts import differences, facts
from .remote import RemoteNode, RemoteUnit

TELL_INTERVAL = 10.0  # seconds between two lines about what the run waits for


class ClusterError(UsageError):
    """The cluster cannot run the tests; nothing was run."""


@dataclass(frozen=True)
class JoiningNode:
    """A node on which a launcher has started an agent."""

    name: str
    stream: socket.socket
    prepare: PrepareNode
    how_it_ended: Callable[[], str]


class LauncherListener(Protocol):
    """Receives what a launcher says about nodes."""

    def join(self, joining: JoiningNode) -> None:
        """An agent has been started."""

    def drain(self, name: str) -> None:
        """A node is to be left."""

    def refuse(self, why: str, is_node: bool) -> None:
        """No agent can start on a node. `is_node`: the node was lost just then, and the run begins without it."""


class NodeLauncher(Protocol):
    """Starts agents on nodes, as they become free, and carries their bytes."""

    @property
    def waits_for(self) -> str:
        """The thing that it waits for, in words; empty if no further node is on its way."""

    @property
    def failure(self) -> str:
        """Why no node will come; empty as long as some may."""

    @property
    def expected(self) -> int:
        """The number of nodes that the run should begin with; 0 for those that are free at the start."""

    def open(self, loop: EventLoop, listener: LauncherListener) -> None:
        """Begin to start agents."""

    def release(self, name: str) -> None:
        """A node is lost or not needed any more."""

    def close(self) -> None:
        """End all agents, and leave nothing behind."""


@dataclass
class _Node:
    remote: RemoteNode
    facts: NodeFacts | None = None
    ready: NodeReady | None = None


class ClusterPlace:
    """The nodes of a run, which may come and go: `with ClusterPlace(...) as place:`."""

    def __init__(
        self,
        launcher: NodeLauncher,
        leases: NodeLeases,
        timeout: float,
        say: Callable[[str], object],
        warn: Callable[[str], object],
    ):
        """`timeout`: how long to wait for nodes, in seconds."""
        self.loop = EventLoop()
        self.leases = leases
        self.warnings: list[str] = []
        self.torch_version = ""
        self._launcher = launcher
        self._timeout = timeout
        self._say = say
        self.warn = warn
        self._nodes: dict[str, _Node] = {}
        self._draining: set[str] = set()
        self._refused = ""
        self._lost: list[str] = []  # how nodes were lost
        self._differs: list[str] = []
        self._found: TestsFound | None = None
        self._waits_until: float | None = None
        self._tells: Timer | None = None
        self._has_begun = False  # from here on, a node that differs is left out

    def __enter__(self) -> ClusterPlace:
        self._launcher.open(self.loop, self)
        self._tick()
        return self

    def __exit__(self, *exception: object) -> None:
        for node in self._nodes.values():
            node.remote.close()
        self._launcher.close()
        self.loop.close()

    def _tick(self) -> None:
        for node in list(self._nodes.values()):
            node.remote.tick()
        for name in [name for name in self._draining if name in self._nodes and self._nodes[name].remote.is_idle]:
            self._leave(name)
        self.loop.after(HEARTBEAT, self._tick)

    def _leave(self, name: str) -> None:
        """Give back a node on which nothing runs any more."""
        self._nodes.pop(name).remote.close()
        self.leases.drop(name)
        self._launcher.release(name)

    # -- before the run

    def wait_for_nodes(self) -> None:
        """Wait until the nodes are ready that the run begins with. Raises ClusterError."""
        until = time.monotonic() + self._timeout
        self._tell()
        try:
            while not self._can_begin():
                if self._differs:
                    what = "the nodes have other software than this machine:\n" + "\n".join(self._differs)
                    raise ClusterError(f"{what}\nInstall the same versions everywhere, or start the run on a node.")
                if failure := self._refused or self._launcher.failure:
                    lost = f": {self._lost[-1]}" if self._lost and not self._refused else ""
                    raise ClusterError(failure + lost)
                if time.monotonic() >= until:
                    raise ClusterError(f"no run after {self._timeout:g} s of waiting: {self._waiting_for()}")
                self.loop.step(until)
        finally:
            self._stop_telling()
        self._has_begun = True

    def _can_begin(self) -> bool:
        ready = [node for node in self._nodes.values() if node.ready is not None]
        if self._differs or self._refused or len(ready) < max(1, self._launcher.expected):
            return False
        return bool(self._launcher.expected) or (len(ready) == len(self._nodes) and not self._launcher.waits_for)

    def _waiting_for(self) -> str:
        starting = [name for name, node in self._nodes.items() if node.ready is None]
        parts = [f"nodes that start: {', '.join(starting)}"] if starting else []
        parts += [self._launcher.waits_for] if self._launcher.waits_for else []
        parts += [self._lost[-1]] if self._lost else []
        return "; ".join(parts) or "no node has come"

    def _tell(self) -> None:
        self._tells = self.loop.after(TELL_INTERVAL, self._tell_again)

    def _tell_again(self) -> None:
        self._say(f"waiting for {self._waiting_for()}")
        self._tell()

    def _stop_telling(self) -> None:
        if self._tells is not None:
            self._tells.cancel()
            self._tells = None

    @property
    def nodes(self) -> Mapping[str, NodeReady]:
        """The nodes that are ready, by name."""
        return {name: node.ready for name, node in self._nodes.items() if node.ready is not None}

    @property
    def most_at_once(self) -> int:
        """The most devices that one process can use."""
        return max((node.most_at_once for node in self.nodes.values()), default=0)

    def discover(self, files: tuple[str, ...], jobs: int) -> Discovery:
        """Have the largest node import the files. If it is lost meanwhile, another does."""
        self._found = None
        finder: RemoteNode | None = None
        while self._found is None:
            if finder is None or finder.is_lost:
                finder = self._largest()
                finder.send(FindTests(files, self.most_at_once, jobs))
            self.loop.step()
        found: TestsFound = self._found
        return Discovery(found.tests, found.broken, found.not_run, found.warnings)

    def _largest(self) -> RemoteNode:
        if not self.nodes:
            raise CannotRun(f"no node is left: {self._lost[-1]}")
        name = max(self.nodes, key=lambda one: (self.nodes[one].most_at_once, self.nodes[one].slots))
        return self._nodes[name].remote

    # -- what happens to nodes

    def join(self, joining: JoiningNode) -> None:
        if joining.name in self._nodes:
            self._nodes[joining.name].remote.lose("its agent was started again")
        node = RemoteNode(joining.name, joining.stream, self.loop, self, joining.how_it_ended)
        self._nodes[joining.name] = _Node(node)
        node.send(joining.prepare)

    def refuse(self, why: str, is_node: bool) -> None:
        """An error before the run, unless the node was lost, and a warning later, since it goes on without."""
        if self._has_begun or is_node:
            self._lost.append(why)
            self.warnings.append(why)
            self.warn(why)
        else:
            self._refused = self._refused or why

    def drain(self, name: str) -> None:
        if name in self._nodes:
            self.leases.drain(name)
            self._draining.add(name)
            self.node_warned(self._nodes[name].remote, "it is about to be taken away: it gets no further tests")

    def node_said_hello(self, node: RemoteNode, hello: AgentHello) -> None:
        """The first message of an agent: compare what must be the same."""
        self._nodes[node.name].facts = hello.facts
        if found := differences(facts(), {node.name: hello.facts}):
            if self._has_begun:
                node.lose("it has other software than this machine:\n" + "\n".join(found))
            else:
                self._differs += found

    def node_is_ready(self, node: RemoteNode, ready: NodeReady) -> None:
        self._nodes[node.name].ready = ready
        self.torch_version = self.torch_version or ready.torch
        self.leases.add(node.name, ready.devices, ready.slots)
        self._waits_until = None
        if self._has_begun:
            self._say(f"node {node.name} has joined")

    def node_found_tests(self, node: RemoteNode, found: TestsFound) -> None:
        self._found = found

    def node_warned(self, node: RemoteNode, text: str) -> None:
        warning = f"node {node.name}: {text}"
        if warning not in self.warnings:
            self.warnings.append(warning)
            self.warn(warning)

    def node_lost(self, node: RemoteNode, why: str) -> None:
        del self._nodes[node.name]
        self.leases.drop(node.name)
        self._lost.append(f"node {node.name} was lost: {why}")
        self._launcher.release(node.name)
        warning = self._lost[-1]
        self.warnings.append(warning)
        self.warn(warning)

    # -- the place of the engine

    def start(self, unit: Unit, lease: Lease, listener: LostUnitListener) -> RemoteUnit:
        return self._nodes[lease.node].remote.run(RunUnit(unit, lease, self.most_at_once), listener)

    def close_file(self, name: str) -> None:
        for node in self._nodes.values():
            node.remote.send(CloseFile(name))

    def wait_for_more(self) -> bool:
        """No unit runs, and none that waits fits: nodes may come for a while."""
        now = time.monotonic()
        if self._waits_until is None:
            self._waits_until = now + (self._timeout if not self._launcher.failure else 0.0)
            self.loop.at(self._waits_until, lambda: None)
            self._say(f"waiting for a node: {self._waiting_for()}")
        return now < self._waits_until and not self._launcher.failure

    @property
    def shortage(self) -> str:
        """Why units that wait fit nowhere."""
        left = f"the {len(self._nodes)} nodes that are left are too small" if self._nodes else "no node is left"
        return f"{left}: {self._lost[-1]}" if self._lost else left
