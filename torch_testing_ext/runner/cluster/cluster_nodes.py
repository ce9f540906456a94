"""The nodes of a run, which come and go. They know no Ray and no Slurm: a launcher starts the agents."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch_testing_ext._process.loop import EventLoop

from ..options.options import CannotRun, UsageError
from ..scheduling.node_leases import NodeLeases
from .agent_messages import HEARTBEAT, AgentHello, NodeReady, PrepareNode, ToAgent
from .facts import differences, facts
from .remote import RemoteNode


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
    ready: NodeReady | None = None
    draining: bool = False


class ClusterNodes:
    """The nodes with an agent of ours: before the run those that it begins with, then also those that join."""

    def __init__(self, launcher: NodeLauncher, leases: NodeLeases, loop: EventLoop, say: Callable[[str], object]):
        self.warn: Callable[[str], object] = lambda text: None  # until the run has a reporter
        self.warnings: list[str] = []
        self.lost: list[str] = []  # how nodes were lost
        self.refused = ""  # why the run cannot begin
        self.has_begun = False  # from here on, a node that differs is left out
        self.joined = 0  # how many have become ready, also if they are lost now
        self._nodes: dict[str, _Node] = {}
        self._launcher, self._leases, self._loop, self._say = launcher, leases, loop, say

    def open(self) -> None:
        self._launcher.open(self._loop, self)
        self._tick()

    def close(self) -> None:
        for node in self._nodes.values():
            node.remote.close()
        self._launcher.close()

    def _tick(self) -> None:
        for node in list(self._nodes.values()):
            node.remote.tick()
        for name in [name for name, node in self._nodes.items() if node.draining and node.remote.is_idle]:
            self._nodes[name].remote.close()
            self._forget(name)
        self._loop.after(HEARTBEAT, self._tick)

    def _forget(self, name: str) -> None:
        del self._nodes[name]
        self._leases.drop(name)
        self._launcher.release(name)

    def _warn(self, warning: str) -> None:
        self.warnings.append(warning)
        self.warn(warning)

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def ready(self) -> Mapping[str, NodeReady]:
        """The nodes that are ready, by name."""
        return {name: node.ready for name, node in self._nodes.items() if node.ready is not None}

    def remote(self, name: str) -> RemoteNode:
        return self._nodes[name].remote

    @property
    def largest(self) -> RemoteNode:
        """Raises CannotRun if none is left."""
        ready = self.ready
        if not ready:
            raise CannotRun(f"no node is left: {self.lost[-1]}")
        return self.remote(max(ready, key=lambda one: (ready[one].most_at_once, ready[one].slots)))

    def send(self, message: ToAgent) -> None:
        """Send a message to all agents."""
        for node in self._nodes.values():
            node.remote.send(message)

    @property
    def awaited(self) -> str:
        """The thing that the run waits for, in words."""
        starting = [name for name, node in self._nodes.items() if node.ready is None]
        parts = [f"nodes that start: {', '.join(starting)}"] if starting else []
        parts += [self._launcher.waits_for] if self._launcher.waits_for else []
        parts += [self.lost[-1]] if self.lost else []
        return "; ".join(parts) or "no node has come"

    # -- what launchers say

    def join(self, joining: JoiningNode) -> None:
        if joining.name in self._nodes:
            self.remote(joining.name).lose("its agent was started again")
        node = RemoteNode(joining.name, joining.stream, self._loop, self, joining.how_it_ended)
        self._nodes[joining.name] = _Node(node)
        node.send(joining.prepare)

    def refuse(self, why: str, is_node: bool) -> None:
        """An error before the run, unless the node was lost, and a warning later, since it goes on without."""
        if self.has_begun or is_node:
            self.lost.append(why)
            self._warn(why)
        else:
            self.refused = self.refused or why

    def drain(self, name: str) -> None:
        if name in self._nodes:
            self._leases.drain(name)
            self._nodes[name].draining = True
            self.node_warned(self.remote(name), "it is about to be taken away: it gets no further tests")

    # -- what agents say

    def node_said_hello(self, node: RemoteNode, hello: AgentHello) -> None:
        """The first message of an agent: compare what must be the same."""
        if found := "\n".join(differences(facts(), {node.name: hello.facts})):
            if self.has_begun:
                node.lose(f"it has other software than this machine:\n{found}")
            else:
                advice = "Install the same versions everywhere, or start the run on a node."
                self.refuse(f"the nodes have other software than this machine:\n{found}\n{advice}", is_node=False)

    def node_is_ready(self, node: RemoteNode, ready: NodeReady) -> None:
        self._nodes[node.name].ready = ready
        self._leases.add(node.name, ready.devices, ready.slots)
        self.joined += 1
        if self.has_begun:
            self._say(f"node {node.name} has joined")

    def node_warned(self, node: RemoteNode, text: str) -> None:
        warning = f"node {node.name}: {text}"
        if warning not in self.warnings:
            self._warn(warning)

    def node_lost(self, node: RemoteNode, why: str) -> None:
        self._forget(node.name)
        self.lost.append(f"node {node.name} was lost: {why}")
        self._warn(self.lost[-1])
