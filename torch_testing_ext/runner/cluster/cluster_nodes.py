"""The nodes of a run, which come and go, and their units as run_test.py sees them."""

from __future__ import annotations

import enum
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch_testing_ext._process.event_loop import EventLoop
from torch_testing_ext._process.messages import unexpected
from torch_testing_ext._process.words import first_names
from torch_testing_ext.runner.engine.running_unit import UnitListener
from torch_testing_ext.runner.engine.unit_log import EndCause
from torch_testing_ext.runner.model import Attempt, Lease, Test, Unit
from torch_testing_ext.runner.processes.file_processes import Discovery
from torch_testing_ext.runner.scheduling.leases import NodeLeases

from . import agent_messages
from .agent_messages import (
    HEARTBEAT,
    AgentHello,
    FetchFiles,
    FileChanged,
    MessageReader,
    MessageWriter,
    NodeReady,
    NotAMessage,
    ToAgent,
)
from .node_contents import ComingBack, differing_facts, facts_of_machine

# --------------------------------------------------------------------------------------------------------------------
# A node of a cluster and its units, as run_test.py sees them: proxies that speak with the agent of the node.

WRITER_TIMEOUT = 1.0


@dataclass(frozen=True)
class JoiningNode:
    """A node on which a launcher has started an agent."""

    name: str
    stream: socket.socket
    prepare: agent_messages.PrepareNode
    # Asked when the stream has ended.
    how_it_ended: Callable[[], str]
    warnings: tuple[str, ...] = ()
    # The path of its copy of the project, and that of the project here.
    renamed: tuple[str, str] = ("", "")


class NodeState(enum.Enum):
    """The state of a node with an agent of ours."""

    STARTS = "its agent starts"
    READY = "it runs units"
    DRAINS = "it gets no more tests"
    SENDS = "its tests have ended, and it sends the files that they changed"
    DONE = "it has sent them"


class NodeListener(Protocol):
    """Receives what happens to nodes."""

    def node_said_hello(self, node: RemoteNode, hello: agent_messages.AgentHello) -> None: ...
    def node_is_ready(self, node: RemoteNode, ready: agent_messages.NodeReady) -> None: ...
    def node_warned(self, node: RemoteNode, text: str) -> None: ...
    def node_changed_file(self, node: RemoteNode, changed: agent_messages.FileChanged) -> None: ...
    def node_sent_files(self, node: RemoteNode) -> None: ...
    def node_lost(self, node: RemoteNode, why: str) -> None: ...


class RemoteNode:
    """A node with its agent, at the other end of a byte stream."""

    def __init__(self, joining: JoiningNode, loop: EventLoop, listener: NodeListener):
        self.name = joining.name
        self.state = NodeState.STARTS
        self.ready: agent_messages.NodeReady | None = None
        # It is given back when it is done.
        self.leaves = False
        # For so many heartbeats.
        self.idle = 0
        self.is_lost = False
        self.found: Discovery | None = None
        self._stream = joining.stream
        self._loop = loop
        self._listener = listener
        self._how_it_ended = joining.how_it_ended
        self._reader: MessageReader[agent_messages.FromAgent] = MessageReader(
            self._stream.fileno(), agent_messages.FromAgent, first=agent_messages.AgentHello, renamed=joining.renamed
        )
        self._units: dict[int, RemoteUnit] = {}
        # An agent that does not read must not hold up the run.
        self._writer = MessageWriter(self._stream.fileno())
        # Signs of life.
        self._missing = 0
        # From the node's time.monotonic() to ours.
        self.offset = float("inf")
        loop.listen(self._reader, self._receive)

    # -- requests

    def run(self, request: agent_messages.RunUnit, listener: UnitListener) -> RemoteUnit:
        unit = request.unit
        self._units[unit.number] = RemoteUnit(self, unit, request.lease, listener)
        self.send(request)
        return self._units[unit.number]

    def send(self, message: agent_messages.ToAgent) -> None:
        """Send a message. If the agent is gone, only receiving shows it."""
        if not self.is_lost:
            self._writer.send(message)

    @property
    def is_idle(self) -> bool:
        return not self._units

    def tick(self) -> None:
        """Call this once for each sign of life that should have come. Counted, not timed: we may have been stopped."""
        self._missing += 1
        if self._missing > agent_messages.MOST_MISSING:
            self.lose(f"it has not answered for {agent_messages.MOST_MISSING} s")

    def lose(self, why: str) -> None:
        """Give up the node: its agent ends, and its units are lost."""
        if self.is_lost:
            return
        self.close()
        self._listener.node_lost(self, why)
        units, self._units = self._units, {}
        for unit in units.values():
            unit.lose(f"node {self.name} was lost: {why}")

    def close(self) -> None:
        """End the agent and everything below it."""
        if not self.is_lost:
            self.is_lost = True
            self._loop.forget(self._reader)
            with suppress(OSError):
                # Or the writer would wait for ever.
                self._stream.shutdown(socket.SHUT_RDWR)
            self._writer.finish(WRITER_TIMEOUT)
            self._stream.close()

    # -- messages

    def _receive(self) -> None:
        try:
            for message in self._reader.receive():
                self._missing = 0
                if not self.is_lost:
                    self._on_message(message)
        except EOFError:
            how = self._how_it_ended()
            if self._reader.ignored:
                how += "; it printed: " + " | ".join(self._reader.ignored[-5:])
            self.lose(how)
        except NotAMessage as error:
            self.lose(f"its agent sent something that is not a message: {error}")

    def _on_message(self, message: agent_messages.FromAgent) -> None:
        """Handle what the agent says of its node; messages about a unit go to that."""
        match message:
            case agent_messages.AgentHello():
                self._see_clock(message.at)
                self._listener.node_said_hello(self, message)
            case agent_messages.AgentAlive(at):
                self._see_clock(at)
            case agent_messages.NodeReady():
                self._listener.node_is_ready(self, message)
            case agent_messages.NodeCannotRun(why):
                self.lose(why)
            case Discovery():
                self.found = message
            case agent_messages.AgentWarned(text):
                self._listener.node_warned(self, text)
            case agent_messages.FileChanged():
                self._listener.node_changed_file(self, message)
            case agent_messages.AllFilesSent():
                self._listener.node_sent_files(self)
            case _:
                unit = self._units[message.number]
                if isinstance(message, agent_messages.EndOfUnit):
                    del self._units[message.number]
                unit.on_message(message)

    def _see_clock(self, at: float) -> None:
        """The message that took the least time tells the offset best."""
        self.offset = min(self.offset, time.monotonic() - at)


@dataclass(eq=False)
class RemoteUnit:
    """A unit that runs on a node."""

    node: RemoteNode
    unit: Unit
    lease: Lease
    listener: UnitListener
    cause: EndCause = EndCause.ITSELF
    # Tests with a result.
    _reported: set[int] = field(default_factory=set)
    _running: int = 0
    # The running test.
    _began: float = field(default_factory=time.monotonic)
    _stacks_wanted: deque[Callable[[str], object]] = field(default_factory=deque)
    _output: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._index = {test.id: number for number, test in enumerate(self.unit.tests)}

    # -- requests

    def end(self, cause: EndCause) -> None:
        """Escalate: SIGTERM, then SIGKILL."""
        if self.cause is EndCause.ITSELF:
            self.cause = cause
            self.node.send(agent_messages.EndUnit(self.unit.number, cause))

    def kill(self) -> None:
        self.cause = EndCause.INTERRUPTED
        self.node.send(agent_messages.EndUnit(self.unit.number, self.cause, at_once=True))

    def ask_for_stacks(self, answer: Callable[[str], object]) -> None:
        self._stacks_wanted.append(answer)
        self.node.send(agent_messages.AskUnit(self.unit.number))

    @property
    def test(self) -> Test:
        """The test that is running, or is about to run."""
        return self.unit.tests[self._running]

    @property
    def seconds(self) -> float:
        """The time that the current test has been running."""
        return time.monotonic() - self._began

    def new_output(self) -> str:
        """The output since the last call."""
        output = "".join(self._output)
        self._output = []
        return output

    # -- what the agent says

    def on_message(self, message: agent_messages.FromUnit) -> None:
        """Handle what the agent says of the unit."""
        match message:
            case agent_messages.BeganInUnit(_, test, at):
                self._running, self._began = test, at + self.node.offset
                self.listener.test_began(self, self.test)
            case agent_messages.IsSlowInUnit(_, test, seconds):
                self.listener.test_is_slow(self, self.unit.tests[test], seconds)
            case agent_messages.ResultsOfUnit(_, attempts):
                self.listener.results(self, self._ours(attempts))
            case agent_messages.EndOfUnit():
                self._answer_all()
                self.cause = message.cause
                self.listener.unit_ended(self, self._ours(message.attempts), list(message.rest))
            case agent_messages.StacksOfUnit(_, stacks):
                if self._stacks_wanted:
                    self._stacks_wanted.popleft()(stacks)
            case agent_messages.OutputOfUnit(_, text):
                self._output.append(text)
            case _:
                unexpected(message)

    def lose(self, why: str) -> None:
        """The node is lost."""
        self._answer_all()
        numbers = range(len(self.unit.tests))
        without_result = [number for number in numbers if number not in self._reported]
        self.listener.unit_lost(self, without_result, why)

    def _answer_all(self) -> None:
        while self._stacks_wanted:
            self._stacks_wanted.popleft()("")

    def _ours(self, attempts: tuple[Attempt, ...]) -> list[Attempt]:
        """The attempts with our clock, our tests and our lease."""
        ours = []
        for attempt in attempts:
            number = self._index[attempt.test.id]
            self._reported.add(number)
            began = attempt.began + self.node.offset
            ours.append(replace(attempt, test=self.unit.tests[number], began=began, lease=self.lease))
        return ours


# --------------------------------------------------------------------------------------------------------------------
# The nodes of a run, which come and go. They know no Ray and no Slurm: a launcher starts the agents.

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
        # How nodes were lost, or could not be used.
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
        # How many have become ready, also if they are lost now.
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
