"""The messages of agents, as lines of JSON over any byte stream."""

import json
import os
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from torch_testing_ext._process import messages
from torch_testing_ext.runner.engine.unit_log import EndCause
from torch_testing_ext.runner.model import Attempt, Lease, Unit
from torch_testing_ext.runner.options import Options, UsageError
from torch_testing_ext.runner.processes.file_processes import Discovery

# --------------------------------------------------------------------------------------------------------------------
# Typed messages as lines of JSON over any byte stream: a pipe, a socket, the stdin and stdout of a remote command.

Received = TypeVar("Received")

_CHUNK = 1 << 18
# Seconds that a message which is not urgent waits for others.
_LINGER = 0.05
# Characters of a line that is no message.
_SHOWN = 200


class NotAMessage(Exception):
    """A line on the stream is not a message of the expected types; the text says which."""


def _in_json(text: str) -> bytes:
    """The text as a part of a string of JSON."""
    return json.dumps(text)[1:-1].encode()


class MessageReader(Generic[Received]):
    """Reads messages from a descriptor. `receives` is the union of their types."""

    def __init__(
        self,
        fd: int,
        receives: Any,
        first: type | None = None,
        renamed: tuple[str, str] = ("", ""),
    ):
        """`first`: lines before the first message of this type are not for us, such as what a login shell prints.

        `renamed`: a path in all texts, and the path that it gets.
        """
        there, here = renamed
        self._fd = fd
        self._kinds = messages.by_name(receives)
        self._first = first
        self._there = _in_json(there)
        self._here = _in_json(here)
        self._lines = messages.LineBuffer()
        # The lines before the first message.
        self.ignored: list[str] = []

    def fileno(self) -> int:
        return self._fd

    def receive(self) -> list[Received]:
        """Wait for data and return the messages that are complete. Raises EOFError at the end, and NotAMessage."""
        try:
            data = os.read(self._fd, _CHUNK)
        except (ConnectionResetError, BrokenPipeError):
            data = b""
        if not data:
            raise EOFError
        return list(self._messages(self._lines.add(data)))

    def _messages(self, lines: list[bytes]) -> Iterator[Received]:
        """The messages of whole lines. Raises NotAMessage."""
        for line in lines:
            if self._there and self._there in line:
                line = line.replace(self._there, self._here)
            try:
                message = messages.from_json(line, self._kinds)
            except Exception:
                # Whatever it is, it is none of our messages.
                if self._first is None:
                    shown = line[:_SHOWN].decode("utf-8", "replace")
                    raise NotAMessage(f"{shown!r} is not a message") from None
                self.ignored.append(line[:_SHOWN].decode("utf-8", "replace"))
                continue
            if self._first is not None and isinstance(message, self._first):
                self._first = None
            yield message


class MessageWriter:
    """Writes messages to a descriptor in a thread of its own: a reader that is slow does not hold up the sender."""

    def __init__(self, fd: int):
        self._fd = fd
        self._lines: queue.SimpleQueue[tuple[bytes, bool] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self, message: Any, urgent: bool = True) -> None:
        """A message that is not urgent may wait for the next one: each piece of the stream costs a call of Ray."""
        self._lines.put((messages.to_line(message), urgent))

    def finish(self, timeout: float) -> None:
        """Write what waits, for at most `timeout` seconds."""
        self._lines.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        # If the reader is gone, only reading shows it.
        with suppress(OSError):
            more = True
            while more:
                lines, more = self._next_lines()
                data = b"".join(lines)
                while data:
                    data = data[os.write(self._fd, data) :]

    def _next_lines(self) -> tuple[list[bytes], bool]:
        """All that wait, as soon as one is urgent or has waited for a while; and whether more may come."""
        lines: list[bytes] = []
        until = None
        with suppress(queue.Empty):
            while True:
                item = self._lines.get(timeout=None if until is None else max(0.0, until - time.monotonic()))
                if item is None:
                    return lines, False
                line, urgent = item
                lines.append(line)
                if urgent:
                    until = 0.0
                elif until is None:
                    until = time.monotonic() + _LINGER
        return lines, True


# --------------------------------------------------------------------------------------------------------------------
# The messages between run_test.py and the agent of a node: lines of JSON over any byte stream.


class ClusterError(UsageError):
    """The cluster cannot run the tests; nothing was run."""


# Seconds between two signs of life of an agent, and how many may be missing before its node counts as lost.
HEARTBEAT = 1.0
MOST_MISSING = 15


# -- to the agent


@dataclass(frozen=True)
class PrepareNode:
    """Start the processes of a node. The first message to an agent."""

    # Of the tested project, on the node.
    root: str
    # Of the run.
    options: Options
    # The most CPU slots to use; None for one per usable core.
    jobs: int | None
    # The names of accelerators that do not exist, to try out a cluster without any.
    fake_devices: tuple[str, ...]
    # That reruns a test whose name is appended.
    command: str
    # Variables of run_test.py that tests may read.
    environ: Mapping[str, str]
    # Accelerators that Ray or Slurm has reserved there.
    reserved: int = 0
    # That shows the failure of a test whose name is appended.
    show_command: str = ""
    # The agent was started by a worker of Ray.
    undo_worker: bool = False
    # Patterns of the files that come back; None if `root` is not a copy of the project.
    fetch: tuple[str, ...] | None = None
    # Tests rewrite expected texts, which come back as well.
    accepts: bool = False


@dataclass(frozen=True)
class FindTests:
    """Import files and list their tests; the answer is a Discovery."""

    files: tuple[str, ...]
    # Of the largest node.
    devices: int
    jobs: int


@dataclass(frozen=True)
class RunUnit:
    """Run a unit on a lease of the node."""

    unit: Unit
    lease: Lease
    # Of the largest node.
    devices: int


@dataclass(frozen=True)
class EndUnit:
    """End a unit by escalation, or kill it `at_once`."""

    number: int
    cause: EndCause
    at_once: bool = False


@dataclass(frozen=True)
class AskUnit:
    """Have the processes of a unit write their stacks."""

    number: int


@dataclass(frozen=True)
class CloseFile:
    """End the process of a file."""

    name: str


@dataclass(frozen=True)
class FetchFiles:
    """Send the files of the project that tests have changed. No unit runs any more."""


ToAgent: TypeAlias = PrepareNode | FindTests | RunUnit | EndUnit | AskUnit | CloseFile | FetchFiles


# -- from the agent


@dataclass(frozen=True)
class NodeFacts:
    """Facts that must be the same everywhere, because outcomes and messages depend on them."""

    # Version and digest of torch_testing_ext.
    package: str
    torch: str
    # Or ROCm; empty for neither.
    cuda: str
    python: str
    platform: str


@dataclass(frozen=True)
class AgentHello:
    """The agent runs. The first message from it; before it, a login shell may have printed anything."""

    facts: NodeFacts
    pid: int
    at: float


@dataclass(frozen=True)
class AgentAlive:
    """A sign of life, with the node's time.monotonic()."""

    at: float


@dataclass(frozen=True)
class NodeReady:
    """The processes of the node have started."""

    # Of its accelerators.
    kind: str | None
    devices: tuple[str, ...]
    most_at_once: int
    fake: bool
    slots: int
    torch: str


@dataclass(frozen=True)
class NodeCannotRun:
    """The node is of no use; the reason."""

    why: str


@dataclass(frozen=True)
class BeganInUnit:
    """A test of a unit begins. Here as below, a test is its index in the unit."""

    number: int
    test: int
    at: float


@dataclass(frozen=True)
class IsSlowInUnit:
    """A test of a unit has been running for longer than the setting slow-after."""

    number: int
    test: int
    seconds: float


@dataclass(frozen=True)
class ResultsOfUnit:
    """Tests of a unit have ended."""

    number: int
    attempts: tuple[Attempt, ...]


@dataclass(frozen=True)
class EndOfUnit:
    """No process of a unit is left. `rest`: its tests without a result."""

    number: int
    attempts: tuple[Attempt, ...]
    rest: tuple[int, ...]
    cause: EndCause


@dataclass(frozen=True)
class StacksOfUnit:
    """The stacks of a unit's processes."""

    number: int
    stacks: str


@dataclass(frozen=True)
class OutputOfUnit:
    """With -s: new output of a unit."""

    number: int
    text: str


@dataclass(frozen=True)
class FileChanged:
    """A file that is not as it was sent. `digest`: empty if it is gone. `content`: None if it does not come back."""

    name: str
    digest: str
    content: bytes | None


@dataclass(frozen=True)
class AllFilesSent:
    """The answer to FetchFiles is complete."""


@dataclass(frozen=True)
class AgentWarned:
    """A warning for the user."""

    text: str


FromUnit: TypeAlias = BeganInUnit | IsSlowInUnit | ResultsOfUnit | EndOfUnit | StacksOfUnit | OutputOfUnit
FromProject: TypeAlias = FileChanged | AllFilesSent
FromAgent: TypeAlias = (
    AgentHello | AgentAlive | NodeReady | NodeCannotRun | Discovery | FromUnit | FromProject | AgentWarned
)
