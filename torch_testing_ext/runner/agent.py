"""The agent of a node: everything below the engine, as a process that speaks lines of JSON on its stdin and stdout.

`python -m torch_testing_ext.runner.agent [--die-with-parent] [--ray-memory-threshold=SHARE]`. When its stdin ends, it
ends everything that it has started, and itself. It knows nothing of Ray or Slurm, which start it and carry the bytes.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

from torch_testing_ext._machine.memory import MachineMemory
from torch_testing_ext._process import child, signals, system
from torch_testing_ext._process.messages import unexpected

from .cluster.agent_messages import (
    HEARTBEAT,
    AgentAlive,
    AgentHello,
    AgentWarned,
    AskUnit,
    CloseFile,
    EndOfUnit,
    EndUnit,
    FindTests,
    KillUnit,
    NodeCannotRun,
    NodeReady,
    OutputOfUnit,
    PrepareNode,
    ResultsOfUnit,
    RunUnit,
    StacksOfUnit,
    TestOfUnitBegan,
    TestOfUnitIsSlow,
    TestsFound,
    ToAgent,
    UnitNotStarted,
)
from .cluster.facts import facts
from .cluster.lines import MessageReader, MessageWriter, NotAMessage
from .cluster.memory_watch import MemoryWatch, most_share
from .cluster.node_environment import undo_worker
from .engine.place import LocalPlace, LostUnitListener
from .engine.running_unit import RunningUnit, UnitHandle
from .model import Attempt, Test
from .options.options import CannotRun, Options, UsageError, usable_cores
from .processes.file_processes import FileProcesses
from .scheduling.inventory import Inventory, make_inventory

STREAM_INTERVAL = 0.05
# When the stream has ended: how long the zygote, which may be importing torch, has before it is killed.
QUIT_TIMEOUT = 0.5
WRITE_TIMEOUT = 1.0
RAY_THRESHOLD = "--ray-memory-threshold="


class NodeFileProcesses(FileProcesses):
    """The processes of an agent, which end quickly: whatever has ended the stream may give the node to others."""

    quit_timeout = QUIT_TIMEOUT


class Agent(LostUnitListener):
    """Runs the units of a node for a run_test.py elsewhere."""

    def __init__(
        self,
        files: FileProcesses,
        prepare: PrepareNode,
        reader: MessageReader[ToAgent],
        writer: MessageWriter,
        memory: MachineMemory,
        most_memory: float,
    ):
        """`most_memory`: the share of the memory above which a unit is ended."""
        self._files = files
        self._prepare = prepare
        self._reader = reader
        self._writer = writer
        self._memory = memory
        self._most_memory = most_memory
        self._running: dict[int, RunningUnit] = {}
        self._sent_warnings: set[str] = set()
        self._goes_on = True
        self._early: list[ToAgent] = []  # messages that came while devices were counted
        self._place: LocalPlace | None = None

    def serve(self) -> None:
        """Work until the stream ends. Raises NotAMessage if it has anything else than messages."""
        loop = self._files.loop
        loop.listen(self._reader, self._receive)
        self._beat()
        try:
            self._count()
        except (CannotRun, UsageError, OSError) as error:
            self._writer.send(NodeCannotRun(str(error)))
        for message in self._early:
            self._on_message(message)
        if self._prepare.stream:
            self._copy_output()
        MemoryWatch(loop, self._memory, self._most_memory, lambda: self._running, self._warn)
        while self._goes_on:
            loop.step()

    def _count(self) -> None:
        """Find out what the node has, and say so."""
        asked = self._prepare
        options = Options(
            jobs=asked.jobs or usable_cores(),
            gpus=None,
            timeout=asked.timeout,
            slow=asked.slow,
            stream=asked.stream,
            sanitize=asked.sanitize,
            sanitize_order=asked.sanitize_order,
            shake_seed=asked.shake_seed,
        )
        kind, count = self._files.count_devices()
        inventory = make_inventory(options, os.environ, kind, count, self._files.devices_seen.uuids)
        if asked.fake_devices:
            inventory = Inventory(asked.fake_devices, kind, fake=True)
        if len(inventory.names) < asked.reserved:
            counts = f"{asked.reserved} accelerators are reserved there, and torch sees {len(inventory.names)}"
            self._warn(counts)
        if asked.devices is not None:
            inventory = dataclasses.replace(inventory, names=inventory.names[: asked.devices])
        self._place = LocalPlace(self._files, options, inventory, command=asked.command)
        self._writer.send(
            NodeReady(
                inventory.kind,
                inventory.names,
                inventory.most_at_once,
                inventory.fake,
                options.jobs,
                self._files.torch_version,
            )
        )

    def _beat(self) -> None:
        self._writer.send(AgentAlive(time.monotonic()))
        self._files.loop.after(HEARTBEAT, self._beat)

    def _copy_output(self) -> None:
        for running in tuple(self._running.values()):
            self._copy_output_of(running)
        self._files.loop.after(STREAM_INTERVAL, self._copy_output)

    def _copy_output_of(self, running: UnitHandle) -> None:
        if self._prepare.stream and (text := running.new_output()):
            self._writer.send(OutputOfUnit(running.unit.number, text))

    def _warn(self, warning: str) -> None:
        """Pass on a warning, once."""
        if warning not in self._sent_warnings:
            self._sent_warnings.add(warning)
            self._writer.send(AgentWarned(warning))

    # -- requests

    def _receive(self) -> None:
        try:
            received = self._reader.receive()
        except EOFError:
            self._goes_on = False
            self._files.loop.forget(self._reader)
            raise _StreamEnded from None  # wherever it is: it may be waiting for an import
        for message in received:
            if self._place is None:
                self._early.append(message)
            else:
                self._on_message(message)

    def _on_message(self, message: ToAgent) -> None:
        match message:
            case RunUnit():
                self._run(message)
            case FindTests():
                self._find(message)
            case EndUnit(number, cause):
                self._with(number, lambda unit: unit.end(cause))
            case KillUnit(number):
                self._with(number, lambda unit: unit.kill())
            case AskUnit(number):
                self._with(number, lambda unit: unit.ask_for_stacks(partial(self._answer, number)))
            case CloseFile(name):
                if all(one.unit.file != name for one in self._running.values()):
                    self._files.file(name).close()
            case PrepareNode():
                raise NotAMessage("a second PrepareNode")
            case _:
                unexpected(message)

    def _with(self, number: int, do: Callable[[UnitHandle], object]) -> None:
        """Do something with a unit, unless it has ended meanwhile."""
        if number in self._running:
            do(self._running[number])

    def _answer(self, number: int, stacks: str) -> None:
        self._writer.send(StacksOfUnit(number, stacks))

    def _find(self, message: FindTests) -> None:
        found = self._files.discover(message.files, message.devices, message.jobs)
        if self._files.failure is not None:
            self._writer.send(NodeCannotRun(self._files.failure))
            return
        self._sent_warnings.update(found.warnings)
        self._writer.send(TestsFound(found.tests, found.broken, found.not_run, found.warnings))

    def _run(self, message: RunUnit) -> None:
        unit = message.unit
        if self._place is None:
            self._writer.send(UnitNotStarted(unit.number, "the node cannot run tests"))
            return
        self._files.file(unit.file, message.devices)
        try:
            running = self._place.start(unit, message.lease, self)
            assert isinstance(running, RunningUnit)
            self._running[unit.number] = running
        except OSError as error:
            self._writer.send(UnitNotStarted(unit.number, str(error)))

    # -- events of running units

    def test_began(self, running: UnitHandle, test: Test) -> None:
        unit = running.unit
        # That of a short test goes with its end.
        self._writer.send(TestOfUnitBegan(unit.number, unit.tests.index(test), time.monotonic()), urgent=False)

    def test_is_slow(self, running: UnitHandle, test: Test, seconds: float) -> None:
        unit = running.unit
        self._writer.send(TestOfUnitIsSlow(unit.number, unit.tests.index(test), seconds))

    def results(self, running: UnitHandle, attempts: list[Attempt]) -> None:
        if attempts:
            self._writer.send(ResultsOfUnit(running.unit.number, tuple(attempts)))

    def unit_ended(self, running: UnitHandle, attempts: list[Attempt], rest: list[int]) -> None:
        self._copy_output_of(running)
        del self._running[running.unit.number]
        for warning in self._files.warnings:
            self._warn(warning)
        self._writer.send(EndOfUnit(running.unit.number, tuple(attempts), tuple(rest), running.cause))


class _StreamEnded(Exception):
    """The stream has ended: everything ends."""


def main() -> NoReturn:
    """Serves the stream on stdin and stdout, which nothing else may use, and exits."""
    child.exit_now(serve(MachineMemory()))


def serve(memory: MachineMemory) -> int:
    """Serves the stream, and returns the exit code."""
    of_ray = [word.removeprefix(RAY_THRESHOLD) for word in sys.argv[1:] if word.startswith(RAY_THRESHOLD)]
    if "--die-with-parent" in sys.argv[1:]:
        system.die_with(os.getppid(), signal.SIGKILL)
    signals.unblock()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for run_test.py, which tells the agents
    reader: MessageReader[ToAgent] = MessageReader(_take_over(0, os.O_RDONLY), ToAgent)
    writer = MessageWriter(_take_over(1, None))
    writer.send(AgentHello(facts(), os.getpid(), time.monotonic()))
    try:
        _serve(reader, writer, memory, most_share(*of_ray))
        return 0
    except (_StreamEnded, EOFError):
        return 0
    except NotAMessage as error:
        print(f"the agent of this node ends: on its stdin, {error}", file=sys.stderr)
        return 1
    finally:
        writer.finish(WRITE_TIMEOUT)


def _serve(reader: MessageReader[ToAgent], writer: MessageWriter, memory: MachineMemory, most_memory: float) -> None:
    early: list[ToAgent] = []
    while not early:
        early = reader.receive()
    prepare, *rest = early
    if not isinstance(prepare, PrepareNode) or rest:
        raise NotAMessage(f"{early[-1]!r} is not the expected PrepareNode alone")
    os.environ.update(prepare.environ)
    if prepare.undo_worker:
        for warning in undo_worker():
            writer.send(AgentWarned(warning))
    root = Path(prepare.root)
    with suppress(OSError):
        os.chdir(root)
    try:
        files = NodeFileProcesses(root, drop_in=prepare.drop_in, all_marks=prepare.all_marks).__enter__()
    except CannotRun as error:
        writer.send(NodeCannotRun(str(error)))
        return
    try:
        Agent(files, prepare, reader, writer, memory, most_memory).serve()
    finally:
        files.close()


def _take_over(fd: int, flags: int | None) -> int:
    """A private duplicate of a standard stream, which gets /dev/null or stderr instead: a stray print is no message."""
    ours = os.dup(fd)
    other = os.open(os.devnull, flags) if flags is not None else os.dup(2)
    os.dup2(other, fd)
    os.close(other)
    return ours


if __name__ == "__main__":
    main()
