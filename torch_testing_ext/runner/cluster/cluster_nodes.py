"""The nodes of a run, which come and go. They know no Ray and no Slurm: a launcher starts the agents."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch_testing_ext._process.loop import EventLoop
from torch_testing_ext._process.words import first_names

from ..options.options import CannotRun, UsageError
from ..scheduling.node_leases import NodeLeases
from .agent_messages import HEARTBEAT, AgentHello, FetchFiles, FileChanged, NodeReady, ToAgent
from .node_environment import differences, facts
from .project_changes import ComingBack
from .remote import JoiningNode, NodeState, RemoteNode

IDLE_BEATS = 4  # a node without a unit for so long is given back, if no unit waits
HURRY_TIMEOUT = 2.0  # seconds that a node has to say that its units were killed


class ClusterError(UsageError):
    """The cluster cannot run the tests; nothing was run."""


class NodeLauncher:
    """Starts agents on nodes, as they become free, and carries their bytes."""

    expected = 0  # the number of nodes that the run should begin with; 0 for those that are free at the start

    @property
    def waits_for(self) -> str:
        """The thing that it waits for, in words; empty if no further node is on its way."""
        return ""

    @property
    def failure(self) -> str:
        """Why no node will come; empty as long as some may."""
        return ""

    @property
    def is_connecting(self) -> bool:
        """Whether it does not know the cluster yet: the time to wait for nodes begins later."""
        return False

    def open(self, loop: EventLoop, nodes: ClusterNodes) -> None:
        """Begin to start agents, which join these nodes."""

    def release(self, name: str, refused: str = "") -> None:
        """A node is lost or not needed any more. `refused`: why it is of no use for this run: leave it alone."""

    def take_more(self, wanted: bool) -> bool:
        """Whether the run has use for further nodes. Returns whether others can use those that it gives back."""
        return False

    def close(self, at_once: bool) -> None:
        """End all agents, and leave nothing behind. `at_once`: the user waits for nothing any more."""


class ClusterNodes:
    """The nodes with an agent of ours: before the run those that it begins with, then also those that join."""

    def __init__(self, launcher: NodeLauncher, leases: NodeLeases, loop: EventLoop, say: Callable[[str], object]):
        self.warn: Callable[[str], object] = lambda text: None  # until the run has a reporter
        self.coming_back: ComingBack | None = None  # if the nodes have copies of the project
        self.warnings: list[str] = []
        self.lost: list[str] = []  # how nodes were lost
        self.waiting: Callable[[], int] | None = None  # the units that wait; None as long as all nodes are needed
        self._different: list[str] = []  # the software of nodes that are left alone
        self.joined = 0  # how many have become ready, also if they are lost now
        self._nodes: dict[str, RemoteNode] = {}
        self._hurried = False
        self._launcher, self._leases, self._loop, self._say = launcher, leases, loop, say

    def open(self) -> None:
        self._launcher.open(self._loop, self)
        self._tick()

    def close(self) -> None:
        for node in self._nodes.values():
            node.close()
        self._launcher.close(self._hurried)

    def hurry(self) -> None:
        """Lose the nodes whose units have not ended in a moment although they were killed."""
        self._hurried = True
        self._loop.after(HURRY_TIMEOUT, self._lose_busy)

    def _lose_busy(self) -> None:
        for node in [node for node in self._nodes.values() if not node.is_idle]:
            node.lose("its units have not ended although they were killed")

    def _tick(self) -> None:
        for node in list(self._nodes.values()):
            node.tick()
        for node in [node for node in self._nodes.values() if node.state is NodeState.DRAINS and node.is_idle]:
            node.leaves = True  # no unit runs there, and none will
            self._fetch_from(node)
        self._share()
        self._loop.after(HEARTBEAT, self._tick)

    def _share(self) -> None:
        """Leave nodes to others for which no unit waits."""
        if self.waiting is None:
            return
        waits = self.waiting() > 0
        for node in self._nodes.values() if self._launcher.take_more(waits) else ():
            is_idle = node.state is NodeState.READY and node.is_idle and not waits
            node.idle = node.idle + 1 if is_idle else 0
            if node.idle >= IDLE_BEATS:
                self._leases.drain(node.name)
                node.state = NodeState.DRAINS

    def _fetch_from(self, node: RemoteNode) -> None:
        node.state = NodeState.SENDS
        if self.coming_back is None:
            self.node_sent_files(node)
        else:
            node.send(FetchFiles())

    def are_sending(self) -> bool:
        """The last unit has ended: whether files are still to come from a node."""
        for node in [node for node in self._nodes.values() if node.state in (NodeState.READY, NodeState.DRAINS)]:
            self._fetch_from(node)
        sending = any(node.state is NodeState.SENDS for node in self._nodes.values())
        if not sending and self.coming_back is not None:
            written, warnings = self.coming_back.write()
            if written:
                self._say(f"files that have come back from the nodes: {first_names(written)}")
            for warning in warnings:
                self._warn(warning)
        return sending

    def _forget(self, name: str, refused: str = "") -> None:
        del self._nodes[name]
        self._leases.drop(name)
        self._launcher.release(name, refused)

    def _warn(self, warning: str) -> None:
        self.warnings.append(warning)
        self.warn(warning)

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def ready(self) -> Mapping[str, NodeReady]:
        return {name: one.ready for name, one in self._nodes.items() if one.ready is not None and not one.leaves}

    def remote(self, name: str) -> RemoteNode:
        return self._nodes[name]

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
            node.send(message)

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
        """An agent has been started."""
        if joining.name in self._nodes:
            self.remote(joining.name).lose("its agent was started again")
        self._nodes[joining.name] = node = RemoteNode(joining, self._loop, self)
        for warning in joining.warnings:
            self.node_warned(node, warning)
        node.send(joining.prepare)

    def refuse(self, why: str) -> None:
        """No agent can start on a node: the run goes on with others."""
        self.lost.append(why)
        self._warn(why)

    def why_none(self, failure: str) -> str:
        """Why the run cannot begin, of which the launcher says that much."""
        if self._different:
            found = "\n".join(self._different)
            advice = "Install the same versions everywhere, or start the run on a node."
            return f"the nodes have other software than this machine:\n{found}\n{advice}"
        last = [lost for lost in self.lost[-1:] if lost not in failure and not lost.endswith(failure)]
        return ": ".join([failure, *last])

    def drain(self, name: str) -> None:
        """A node is to be left."""
        if name in self._nodes:
            self._leases.drain(name)
            self._nodes[name].state = NodeState.DRAINS
            self.node_warned(self.remote(name), "it is about to be taken away: it gets no further tests")

    # -- what agents say

    def node_said_hello(self, node: RemoteNode, hello: AgentHello) -> None:
        """The first message of an agent: compare what must be the same."""
        if found := differences(facts(), {node.name: hello.facts}):
            self._different += found
            why = "\n".join([f"node {node.name} has other software than this machine, and is left alone:", *found])
            node.close()
            self._forget(node.name, why)
            self.refuse(why)

    def node_is_ready(self, node: RemoteNode, ready: NodeReady) -> None:
        if node.state is not NodeState.STARTS:
            return  # it drains already
        node.ready, node.state = ready, NodeState.READY
        self._leases.add(node.name, ready.devices, ready.slots)
        self.joined += 1
        if self.waiting is not None:
            self._say(f"node {node.name} has joined")

    def node_warned(self, node: RemoteNode, text: str) -> None:
        warning = f"node {node.name}: {text}"
        if warning not in self.warnings:
            self._warn(warning)

    def node_changed_file(self, node: RemoteNode, changed: FileChanged) -> None:
        if self.coming_back is not None:
            self.coming_back.add(node.name, changed)

    def node_sent_files(self, node: RemoteNode) -> None:
        node.state = NodeState.DONE
        if node.leaves:
            node.close()
            self._forget(node.name)

    def node_lost(self, node: RemoteNode, why: str) -> None:
        self._forget(node.name)
        self.lost.append(f"node {node.name} was lost: {why}")
        self._warn(self.lost[-1])
