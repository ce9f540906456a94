"""A node of a cluster and its units, as the runner sees them."""

from __future__ import annotations

import enum
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch_testing_ext._process.event_loop import EventLoop
from torch_testing_ext._process.messages import unexpected
from torch_testing_ext.runner.engine.running_unit import UnitListener
from torch_testing_ext.runner.engine.unit_log import EndCause
from torch_testing_ext.runner.load_as import FilesFound
from torch_testing_ext.runner.model import Attempt, Lease, Test, Unit
from torch_testing_ext.runner.processes.file_processes import Discovery

from . import agent_messages
from .json_lines import MessageReader, MessageWriter, NotAMessage

WRITER_TIMEOUT = 1.0


@dataclass(frozen=True)
class JoiningNode:
    """A node on which a launcher has started an agent."""

    name: str
    stream: socket.socket
    prepare: agent_messages.PrepareNode
    # A function that is asked when the stream has ended.
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
        # The heartbeats for which it has been idle.
        self.idle = 0
        self.is_lost = False
        self.found: Discovery | None = None
        self.files_found: FilesFound | None = None
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
        # The signs of life that should have come.
        self._missing = 0
        # The difference between the node's clock and ours.
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
            case FilesFound():
                self.files_found = message
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
        self.offset = min(self.offset, self._loop.clock() - at)


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
