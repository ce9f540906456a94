"""The nodes of a run, which come and go."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch_testing_ext._process.event_loop import EventLoop
from torch_testing_ext._process.words import first_names
from torch_testing_ext.runner.scheduling.node_leases import NodeLeases

from .agent_messages import HEARTBEAT, AgentHello, FetchFiles, FileChanged, NodeReady, ToAgent
from .node_environment import differing_facts, facts_of_machine
from .project_changes import ComingBack
from .remote_node import JoiningNode, NodeState, RemoteNode

# A node without a unit for so long is given back, if no unit waits.
IDLE_BEATS = 4
# Seconds that a node has to say that its units were killed.
HURRY_TIMEOUT = 2.0


class NodeLauncher:
    """Starts agents on nodes, as they become free, and carries their bytes."""

    # The number of nodes that the run should begin with; 0 for those that are free at the start.
    expected = 0

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


class Troubles:
    """The troubles with the nodes of a run: warnings for the user, and the ends of nodes."""

    def __init__(self) -> None:
        # Shows a warning; the run has no reporter at first.
        self.show: Callable[[str], object] = lambda text: None
        self.warnings: list[str] = []
        # The ways in which nodes were lost, or could not be used.
        self.lost: list[str] = []
        # The software of nodes that are left alone.
        self.different: list[str] = []

    def warn(self, warning: str) -> None:
        self.warnings.append(warning)
        self.show(warning)

    def warn_about(self, name: str, text: str) -> None:
        """Warn about a node, once."""
        warning = f"node {name}: {text}"
        if warning not in self.warnings:
            self.warn(warning)

    def lose(self, why: str) -> None:
        """A node was lost, or no agent can start there: the run goes on with others."""
        self.lost.append(why)
        self.warn(why)

    def why_none(self, failure: str) -> str:
        """Why the run cannot begin, of which the launcher says that much."""
        if self.different:
            lines = "\n".join(self.different)
            advice = "Install the same versions everywhere, or start the run on a node."
            return f"the nodes have different software than this machine:\n{lines}\n{advice}"
        if self.lost:
            last = self.lost[-1]
            if last not in failure and not last.endswith(failure):
                return f"{failure}: {last}"
        return failure


class ClusterNodes:
    """The nodes with an agent of ours: before the run those that it begins with, then also those that join."""

    def __init__(self, launcher: NodeLauncher, leases: NodeLeases, loop: EventLoop, say: Callable[[str], object]):
        self.troubles = Troubles()
        # If the nodes have copies of the project.
        self.coming_back: ComingBack | None = None
        # The units that wait; None as long as all nodes are needed.
        self.waiting: Callable[[], int] | None = None
        # The number of nodes that have become ready, also if they are lost now.
        self.joined = 0
        self._nodes: dict[str, RemoteNode] = {}
        self._hurried = False
        self._launcher = launcher
        self._leases = leases
        self._loop = loop
        self._say = say

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

        def lose_busy() -> None:
            for node in list(self._nodes.values()):
                if not node.is_idle:
                    node.lose("its units have not ended although they were killed")

        self._loop.after(HURRY_TIMEOUT, lose_busy)

    def _tick(self) -> None:
        for node in list(self._nodes.values()):
            node.tick()
        for node in list(self._nodes.values()):
            if node.state is NodeState.DRAINS and node.is_idle:
                # No unit runs there, and none will.
                node.leaves = True
                self._fetch_from(node)
        self._share()
        self._loop.after(HEARTBEAT, self._tick)

    def _share(self) -> None:
        """Leave nodes to others for which no unit waits."""
        if self.waiting is None:
            return
        waits = self.waiting() > 0
        others_can_use_them = self._launcher.take_more(waits)
        if not others_can_use_them:
            return
        for node in self._nodes.values():
            is_needless = node.state is NodeState.READY and node.is_idle and not waits
            node.idle = node.idle + 1 if is_needless else 0
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
        for node in list(self._nodes.values()):
            if node.state in (NodeState.READY, NodeState.DRAINS):
                self._fetch_from(node)
        if any(node.state is NodeState.SENDS for node in self._nodes.values()):
            return True
        if self.coming_back is not None:
            written, warnings = self.coming_back.write()
            if written:
                self._say(f"files that have come back from the nodes: {first_names(written)}")
            for warning in warnings:
                self.troubles.warn(warning)
        return False

    def _forget(self, name: str, refused: str = "") -> None:
        del self._nodes[name]
        self._leases.drop(name)
        self._launcher.release(name, refused)

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def ready(self) -> Mapping[str, NodeReady]:
        ready = {}
        for name, node in self._nodes.items():
            if node.ready is not None and not node.leaves:
                ready[name] = node.ready
        return ready

    def remote(self, name: str) -> RemoteNode:
        return self._nodes[name]

    def send(self, message: ToAgent) -> None:
        """Send a message to all agents."""
        for node in self._nodes.values():
            node.send(message)

    @property
    def awaited(self) -> str:
        """The thing that the run waits for, in words."""
        parts = []
        starting = [name for name, node in self._nodes.items() if node.ready is None]
        if starting:
            parts.append(f"nodes that start: {', '.join(starting)}")
        if self._launcher.waits_for:
            parts.append(self._launcher.waits_for)
        if self.troubles.lost:
            parts.append(self.troubles.lost[-1])
        return "; ".join(parts) or "no node has come"

    # -- what launchers say

    def join(self, joining: JoiningNode) -> None:
        """An agent has been started."""
        if joining.name in self._nodes:
            self.remote(joining.name).lose("its agent was started again")
        node = RemoteNode(joining, self._loop, self)
        self._nodes[joining.name] = node
        for warning in joining.warnings:
            self.node_warned(node, warning)
        node.send(joining.prepare)

    def drain(self, name: str) -> None:
        """A node is to be left."""
        if name in self._nodes:
            self._leases.drain(name)
            self._nodes[name].state = NodeState.DRAINS
            self.troubles.warn_about(name, "it is about to be taken away, so it gets no more tests")

    # -- what agents say

    def node_said_hello(self, node: RemoteNode, hello: AgentHello) -> None:
        """The first message of an agent: compare what must be the same."""
        different = differing_facts(facts_of_machine(), {node.name: hello.facts})
        if not different:
            return
        self.troubles.different += different
        heading = f"node {node.name} has different software than this machine, so it is not used:"
        why = "\n".join([heading, *different])
        node.close()
        self._forget(node.name, why)
        self.troubles.lose(why)

    def node_is_ready(self, node: RemoteNode, ready: NodeReady) -> None:
        if node.state is not NodeState.STARTS:
            # It drains already.
            return
        node.ready = ready
        node.state = NodeState.READY
        self._leases.add(node.name, ready.devices, ready.slots)
        self.joined += 1
        if self.waiting is not None:
            self._say(f"node {node.name} has joined")

    def node_warned(self, node: RemoteNode, text: str) -> None:
        self.troubles.warn_about(node.name, text)

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
        self.troubles.lose(f"node {node.name} was lost: {why}")
