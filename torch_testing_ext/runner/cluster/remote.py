"""A node of a cluster and its units, as run_test.py sees them: proxies that speak with the agent of the node."""

from __future__ import annotations

import dataclasses
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from torch_testing_ext._process.loop import EventLoop
from torch_testing_ext._process.messages import to_line, unexpected

from ..engine.place import LostUnitListener
from ..engine.unit_log import EndCause
from ..model import Attempt, Lease, Test, TestOutcome, Unit
from .agent_messages import (
    MOST_MISSING,
    AgentAlive,
    AgentHello,
    AgentWarned,
    AskUnit,
    EndOfUnit,
    EndUnit,
    FromAgent,
    FromUnit,
    KillUnit,
    NodeCannotRun,
    NodeReady,
    OutputOfUnit,
    ResultsOfUnit,
    RunUnit,
    StacksOfUnit,
    TestOfUnitBegan,
    TestOfUnitIsSlow,
    TestsFound,
    ToAgent,
    UnitNotStarted,
)
from .lines import MessageReader, NotAMessage


class NodeListener(Protocol):
    """Receives what happens to nodes."""

    def node_said_hello(self, node: RemoteNode, hello: AgentHello) -> None: ...
    def node_is_ready(self, node: RemoteNode, ready: NodeReady) -> None: ...
    def node_warned(self, node: RemoteNode, text: str) -> None: ...
    def node_lost(self, node: RemoteNode, why: str) -> None: ...


class RemoteNode:
    """A node with its agent, at the other end of a byte stream."""

    def __init__(
        self,
        name: str,
        stream: socket.socket,
        loop: EventLoop,
        listener: NodeListener,
        how_it_ended: Callable[[], str] = lambda: "the connection to its agent ended",
    ):
        """`how_it_ended` is asked when the stream has ended."""
        self.name = name
        self.is_lost = False
        self.found: TestsFound | None = None
        self._stream = stream
        self._loop = loop
        self._listener = listener
        self._how_it_ended = how_it_ended
        self._reader: MessageReader[FromAgent] = MessageReader(stream.fileno(), FromAgent, first=AgentHello)
        self._units: dict[int, RemoteUnit] = {}
        self._missing = 0  # signs of life
        self._offset = float("inf")  # from the node's time.monotonic() to ours
        loop.listen(self._reader, self._receive)

    # -- requests

    def run(self, request: RunUnit, listener: LostUnitListener) -> RemoteUnit:
        unit = request.unit
        self._units[unit.number] = RemoteUnit(self, unit, request.lease, listener)
        self.send(request)
        return self._units[unit.number]

    def send(self, message: ToAgent) -> None:
        """Send a message. If the agent is gone, only receiving shows it."""
        if not self.is_lost:
            with suppress(OSError):
                self._stream.sendall(to_line(message))

    @property
    def is_idle(self) -> bool:
        return not self._units

    def tick(self) -> None:
        """Call this once for each sign of life that should have come. Counted, not timed: we may have been stopped."""
        self._missing += 1
        if self._missing > MOST_MISSING:
            self.lose(f"it has given no sign of life for {MOST_MISSING} s")

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
            self._stream.close()

    # -- messages

    def _receive(self) -> None:
        try:
            for message in self._reader.receive():
                self._missing = 0
                if not self.is_lost:
                    self._on_message(message)
        except EOFError:
            printed = "; it printed: " + " | ".join(self._reader.ignored[-5:]) if self._reader.ignored else ""
            self.lose(self._how_it_ended() + printed)
        except NotAMessage as error:
            self.lose(f"its agent sent something else than messages: {error}")

    def _on_message(self, message: FromAgent) -> None:
        match message:
            case AgentHello():
                self._see_clock(message.at)
                self._listener.node_said_hello(self, message)
            case AgentAlive(at):
                self._see_clock(at)
            case NodeReady():
                self._listener.node_is_ready(self, message)
            case NodeCannotRun(why):
                self.lose(why)
            case TestsFound():
                self.found = message
            case AgentWarned(text):
                self._listener.node_warned(self, text)
            case _:
                unit = self._units.get(message.number)
                if unit is None:
                    raise NotAMessage(f"{message!r} is about a unit that is not there")
                if isinstance(message, (EndOfUnit, UnitNotStarted)):
                    del self._units[message.number]
                unit.on_message(message)

    def _see_clock(self, at: float) -> None:
        """The message that took the least time tells the offset best."""
        self._offset = min(self._offset, time.monotonic() - at)

    def to_our_time(self, moment: float) -> float:
        return moment + self._offset


class RemoteUnit:
    """A unit that runs on a node."""

    def __init__(
        self,
        node: RemoteNode,
        unit: Unit,
        lease: Lease,
        listener: LostUnitListener,
    ):
        self.unit = unit
        self.lease = lease
        self.cause = EndCause.ITSELF
        self._node = node
        self._listener = listener
        self._index = {test.id: number for number, test in enumerate(unit.tests)}
        self._reported: set[int] = set()  # tests with a result
        self._running = 0
        self._began = time.monotonic()  # the running test
        self._stacks_wanted: deque[Callable[[str], object]] = deque()
        self._output: list[str] = []

    # -- requests

    def end(self, cause: EndCause) -> None:
        """Escalate: SIGTERM, then SIGKILL."""
        if self.cause is EndCause.ITSELF:
            self.cause = cause
            self._node.send(EndUnit(self.unit.number, cause))

    def kill(self) -> None:
        self.cause = EndCause.INTERRUPTED
        self._node.send(KillUnit(self.unit.number))

    def ask_for_stacks(self, answer: Callable[[str], object]) -> None:
        self._stacks_wanted.append(answer)
        self._node.send(AskUnit(self.unit.number))

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
        new, self._output = self._output, []
        return "".join(new)

    def abandon(self) -> list[Attempt]:
        """The results so far that were not handed out: each is handed out when it comes."""
        return []

    # -- what the agent says

    def on_message(self, message: FromUnit) -> None:
        match message:
            case TestOfUnitBegan(_, test, at):
                self._running, self._began = self._checked(test), self._node.to_our_time(at)
                self._listener.test_began(self, self.test)
            case TestOfUnitIsSlow(_, test, seconds):
                self._listener.test_is_slow(self, self.unit.tests[self._checked(test)], seconds)
            case ResultsOfUnit(_, attempts):
                self._listener.results(self, self._ours(attempts))
            case EndOfUnit():
                self._answer_all()
                self.cause = message.cause
                rest = [self._checked(number) for number in message.rest]
                ended = self._ours(message.attempts)
                if self.cause is not EndCause.INTERRUPTED and len({*self._reported, *rest}) != len(self.unit.tests):
                    raise NotAMessage(f"the end of unit {self.unit.number} leaves out tests")
                self._listener.unit_ended(self, ended, rest)
            case UnitNotStarted(_, why):
                self._answer_all()
                self._listener.unit_ended(self, [self._not_run(test, why) for test in self.unit.tests], [])
            case StacksOfUnit(_, stacks):
                if self._stacks_wanted:
                    self._stacks_wanted.popleft()(stacks)
            case OutputOfUnit(_, text):
                self._output.append(text)
            case _:
                unexpected(message)

    def lose(self, why: str) -> None:
        """The node is lost."""
        self._answer_all()
        without_result = [number for number in range(len(self.unit.tests)) if number not in self._reported]
        self._listener.unit_lost(self, without_result, why)

    def _answer_all(self) -> None:
        while self._stacks_wanted:
            self._stacks_wanted.popleft()("")

    def _checked(self, number: int) -> int:
        if not 0 <= number < len(self.unit.tests):
            raise NotAMessage(f"unit {self.unit.number} has no test {number}")
        return number

    def _ours(self, attempts: tuple[Attempt, ...]) -> list[Attempt]:
        """The attempts with our clock, our tests and our lease."""
        found = []
        for attempt in attempts:
            number = self._index.get(attempt.test.id, -1)
            if number < 0:
                raise NotAMessage(f"a result of {attempt.test.id} that was not asked for")
            self._reported.add(number)
            began = self._node.to_our_time(attempt.began)
            found.append(dataclasses.replace(attempt, test=self.unit.tests[number], began=began, lease=self.lease))
        return found

    def _not_run(self, test: Test, why: str) -> Attempt:
        return Attempt(
            test,
            TestOutcome.ERROR,
            f"it was not run on node {self.lease.node}: {why}",
            began=time.monotonic(),
            repetition=self.unit.repetition,
            number=self.unit.attempt,
            lease=self.lease,
        )
