"""The agent of a node: everything below the engine, as a process that speaks lines of JSON.

python -m torch_testing_ext.runner.cluster.agent [--die-with-parent] [--folder=PATH]
[--ray-memory-threshold=SHARE]

When its stdin ends, it ends everything that it has started, and itself. It knows nothing of Ray or Slurm, which
start it and carry the bytes.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from torch_testing_ext._machine.machine_memory import MachineMemory
from torch_testing_ext._process import sessions, signals, system
from torch_testing_ext._process.messages import unexpected
from torch_testing_ext._process.setting_names import LOGS
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.launch.aspects.output import SHOWN
from torch_testing_ext.runner.engine.running_unit import RunningUnit, UnitHandle, UnitListener
from torch_testing_ext.runner.engine.unit_log import EndCause
from torch_testing_ext.runner.model import Attempt, Test, TestEnd
from torch_testing_ext.runner.options import CannotRun, UsageError
from torch_testing_ext.runner.processes.file_processes import FileProcesses
from torch_testing_ext.runner.run_site import LocalSite
from torch_testing_ext.runner.scheduling.inventory import Inventory, make_inventory

from . import agent_messages
from .changes_on_node import ProjectWatch
from .json_lines import MessageReader, MessageWriter, NotAMessage
from .node_environment import facts_of_machine, undo_worker
from .node_memory import MemoryWatch, most_share

AGENT_STREAM_INTERVAL = 0.05
# When the stream has ended: how long the preloaded server, which may be importing torch, has before it is killed.
# Others may get the node.
AGENT_QUIT_TIMEOUT = 0.5
WRITE_TIMEOUT = 1.0
RAY_THRESHOLD = "--ray-memory-threshold="
AGENT_FOLDER = "--folder="


@dataclass(eq=False)
class Agent(UnitListener):
    """Runs the units of a node for a runner elsewhere."""

    files: FileProcesses
    prepare: agent_messages.PrepareNode
    reader: MessageReader[agent_messages.ToAgent]
    writer: MessageWriter
    memory: MachineMemory
    # The share of it above which a unit is ended.
    most_memory: float
    _running: dict[int, RunningUnit] = field(default_factory=dict)
    _sent_warnings: set[str] = field(default_factory=set)
    # Messages that came while devices were counted.
    _early: list[agent_messages.ToAgent] = field(default_factory=list)
    _site: LocalSite | None = None

    def __post_init__(self) -> None:
        root, patterns = Path(self.prepare.root), self.prepare.fetch
        self._project = None if patterns is None else ProjectWatch(root, patterns, self.prepare.accepts)

    def serve(self) -> NoReturn:
        """Work until the stream ends. Raises NotAMessage if it has anything else than messages."""
        loop = self.files.loop
        loop.serve(self.reader, self._receive, self._end_of_stream)
        self._beat()
        try:
            self._count()
        except (CannotRun, UsageError, OSError) as error:
            self.writer.send(agent_messages.NodeCannotRun(str(error)))
        for message in self._early:
            self._on_message(message)
        if self.prepare.options.value(SHOWN):
            self._copy_output()
        MemoryWatch(loop, self.memory, self.most_memory, lambda: self._running, self._warn)
        while True:
            loop.step()

    def _count(self) -> None:
        """Find out what the node has, and say so."""
        asked = self.prepare
        options = replace(asked.options, jobs=asked.jobs or system.cores(), cluster=None)
        seen = self.files.count_devices()
        inventory = make_inventory(options, os.environ, seen.kind, seen.count, seen.uuids)
        if asked.fake_devices:
            inventory = Inventory(asked.fake_devices, seen.kind, fake=True)
        if len(inventory.names) < asked.reserved:
            self._warn(f"{asked.reserved} accelerators are reserved there, and torch sees {len(inventory.names)}")
        inventory = replace(inventory, names=inventory.names[: options.cluster_gpus_per_node])
        self._site = LocalSite(options, self.files, inventory, command=asked.command, show_command=asked.show_command)
        self.writer.send(
            agent_messages.NodeReady(
                inventory.kind,
                inventory.names,
                inventory.most_at_once,
                inventory.fake,
                options.jobs,
                self.files.torch_version,
            )
        )

    def _beat(self) -> None:
        self.writer.send(agent_messages.AgentAlive(time.monotonic()))
        self.files.loop.after(agent_messages.HEARTBEAT, self._beat)

    def _copy_output(self) -> None:
        for running in tuple(self._running.values()):
            self._copy_output_of(running)
        self.files.loop.after(AGENT_STREAM_INTERVAL, self._copy_output)

    def _copy_output_of(self, running: UnitHandle) -> None:
        if not self.prepare.options.value(SHOWN):
            return
        output = running.new_output()
        if output:
            self.writer.send(agent_messages.OutputOfUnit(running.unit.number, output))

    def _warn(self, warning: str) -> None:
        """Pass on a warning, once."""
        if warning not in self._sent_warnings:
            self._sent_warnings.add(warning)
            self.writer.send(agent_messages.AgentWarned(warning))

    # -- requests

    def _end_of_stream(self) -> None:
        # Wherever the agent is: it may be waiting for an import.
        raise _StreamEnded

    def _receive(self, message: agent_messages.ToAgent) -> None:
        if self._site is None:
            self._early.append(message)
        else:
            self._on_message(message)

    def _on_message(self, message: agent_messages.ToAgent) -> None:
        """Do what the runner asks for."""
        match message:
            case agent_messages.RunUnit():
                self._run(message)
            case agent_messages.FindFilesOfProject():
                self.writer.send(self.files.find_files())
            case agent_messages.FindTests():
                self._find(message)
            case agent_messages.EndUnit(number, cause, at_once):
                # It may have ended meanwhile.
                running = self._running.get(number)
                if running is not None and at_once:
                    running.kill()
                elif running is not None:
                    running.end(cause)
            case agent_messages.AskUnit(number):
                if number in self._running:
                    self._running[number].ask_for_stacks(partial(self._answer, number))
            case agent_messages.FetchFiles():
                if self._project is not None:
                    for changed in self._project.changes():
                        self.writer.send(changed)
                self.writer.send(agent_messages.AllFilesSent())
            case agent_messages.CloseFile(name):
                if all(running.unit.file != name for running in self._running.values()):
                    self.files.file(name).close()
            case agent_messages.PrepareNode():
                raise NotAMessage("a second PrepareNode")
            case _:
                unexpected(message)

    def _answer(self, number: int, stacks: str) -> None:
        self.writer.send(agent_messages.StacksOfUnit(number, stacks))

    def _find(self, message: agent_messages.FindTests) -> None:
        found = self.files.discover(message.files, message.devices, message.jobs)
        if self.files.failure is not None:
            self.writer.send(agent_messages.NodeCannotRun(self.files.failure))
            return
        self._sent_warnings.update(found.warnings)
        self.writer.send(found)

    def _run(self, message: agent_messages.RunUnit) -> None:
        """Start a unit, or report that its tests were not run."""
        unit = message.unit
        why = "the node cannot run tests"
        self.files.file(unit.file, message.devices)
        try:
            if self._site is not None:
                self._running[unit.number] = self._site.start(unit, message.lease, self)
                return
        except OSError as error:
            why = str(error)
        attempts = []
        for test in unit.tests:
            attempt = Attempt(
                test,
                TestEnd(TestOutcome.ERROR, f"it was not run on node {message.lease.node}: {why}"),
                began=time.monotonic(),
                repetition=unit.repetition,
                number=unit.attempt,
            )
            attempts.append(attempt)
        self.writer.send(agent_messages.EndOfUnit(unit.number, tuple(attempts), (), EndCause.ITSELF))

    # -- events of running units

    def test_began(self, running: UnitHandle, test: Test) -> None:
        unit = running.unit
        began = agent_messages.BeganInUnit(unit.number, unit.tests.index(test), time.monotonic())
        # The message of a short test goes with its end.
        self.writer.send(began, urgent=False)

    def test_is_slow(self, running: UnitHandle, test: Test, seconds: float) -> None:
        unit = running.unit
        self.writer.send(agent_messages.IsSlowInUnit(unit.number, unit.tests.index(test), seconds))

    def results(self, running: UnitHandle, attempts: list[Attempt]) -> None:
        if attempts:
            self.writer.send(agent_messages.ResultsOfUnit(running.unit.number, tuple(attempts)))

    def unit_ended(self, running: UnitHandle, attempts: list[Attempt], rest: list[int]) -> None:
        self._copy_output_of(running)
        del self._running[running.unit.number]
        for warning in self.files.warnings:
            self._warn(warning)
        self.writer.send(agent_messages.EndOfUnit(running.unit.number, tuple(attempts), tuple(rest), running.cause))


class _StreamEnded(Exception):
    """The stream has ended: everything ends."""


def main() -> NoReturn:
    """Serves the stream on stdin and stdout, which nothing else may use, and exits."""
    sessions.exit_now(serve(MachineMemory()))


def serve(memory: MachineMemory) -> int:
    """Serves the stream, and returns the exit code."""
    if "--die-with-parent" in sys.argv[1:]:
        system.die_with(os.getppid(), signal.SIGKILL)
    signals.unblock()
    # It is for the runner, which tells the agents.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    reader: MessageReader[agent_messages.ToAgent] = MessageReader(_take_over(0, os.O_RDONLY), agent_messages.ToAgent)
    writer = MessageWriter(_take_over(1, None))
    writer.send(agent_messages.AgentHello(facts_of_machine(), os.getpid(), time.monotonic()))
    try:
        _serve(reader, writer, memory, most_share(_word(RAY_THRESHOLD) or ""))
        return 0
    except (_StreamEnded, EOFError):
        return 0
    except NotAMessage as error:
        print(f"the agent of this node ends: on its stdin, {error}", file=sys.stderr)
        return 1
    finally:
        writer.finish(WRITE_TIMEOUT)


def _word(name: str) -> str | None:
    """The value of a word of the command line."""
    for word in sys.argv[1:]:
        if word.startswith(name):
            return word.removeprefix(name)
    return None


def _serve(
    reader: MessageReader[agent_messages.ToAgent], writer: MessageWriter, memory: MachineMemory, most_memory: float
) -> None:
    """Wait for the description of the node, and serve the run."""
    early: list[agent_messages.ToAgent] = []
    while not early:
        early = reader.receive()
    prepare, *rest = early
    if not isinstance(prepare, agent_messages.PrepareNode) or rest:
        raise NotAMessage(f"{early[-1]!r} is not the expected PrepareNode alone")
    os.environ.update(prepare.environ)
    if prepare.fetch is not None and os.environ.get(LOGS):
        os.environ[LOGS] = str(Path(prepare.root, os.environ[LOGS]))
    if prepare.undo_worker:
        for warning in undo_worker():
            writer.send(agent_messages.AgentWarned(warning))
    root = Path(prepare.root)
    with suppress(OSError):
        os.chdir(root)
    options = prepare.options
    try:
        with FileProcesses(
            root,
            drop_in=bool(options.drop_in),
            load_as=prepare.load_as,
            quit_timeout=AGENT_QUIT_TIMEOUT,
            # Whatever ends this process, the one that has made it removes it.
            base=_word(AGENT_FOLDER),
        ) as files:
            Agent(files, prepare, reader, writer, memory, most_memory).serve()
    except CannotRun as error:
        writer.send(agent_messages.NodeCannotRun(str(error)))


def _take_over(fd: int, flags: int | None) -> int:
    """A private duplicate of a standard stream, which gets /dev/null or stderr instead: a stray print is no message."""
    ours = os.dup(fd)
    other = os.open(os.devnull, flags) if flags is not None else os.dup(2)
    os.dup2(other, fd)
    os.close(other)
    return ours


if __name__ == "__main__":
    main()
