"""The process of one test file, as the runner sees it.

A process that dies is restarted when it is needed again; the processes that it started die with it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from socket import socket

from torch_testing_ext._collectives.failure import FailureView
from torch_testing_ext._process.channels import Channel, socket_pair
from torch_testing_ext._process.event_loop import Timer
from torch_testing_ext._process.logs import tail
from torch_testing_ext._process.messages import unexpected
from torch_testing_ext._process.requested_children import Gone, RequestedChildren
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.runner.load_as import LoadAs
from torch_testing_ext.runner.model import Attempt, Test, TestEnd, TestId

from . import fork_parent_messages, supervisor_messages, unit_spec
from .preloaded_client import PreloadedServerClient

FILE_IMPORT_TIMEOUT = 120.0
# The most imports of a file during which the preloaded server dies.
MOST_LOST_IMPORTS = 3


class FileState(enum.Enum):
    """The current state of the process of a test file."""

    CLOSED = "closed"
    OPENING = "opening"
    READY = "ready"
    # Its units are new interpreters.
    UNSAFE = "not safe to fork"
    SKIPPED = "skips all of its tests"
    BROKEN = "broken"


# A file stays so, whatever its process says later, and when that ends.
_FINAL = (FileState.UNSAFE, FileState.SKIPPED, FileState.BROKEN)


def after(state: FileState, wanted: FileState) -> FileState:
    return state if state in _FINAL else wanted


@dataclass(frozen=True)
class FileContents:
    """The tests of a file, as its import has shown them, and warnings for the user."""

    tests: tuple[Test, ...] = ()
    not_run: tuple[Attempt, ...] = ()
    broken: Attempt | None = None
    unsafe: str = ""
    of_import: tuple[str, ...] = ()
    # Its tests are known, or that it has none.
    is_listed: bool = False

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.unsafe, *self.of_import)))


@dataclass(eq=False)
class SupervisorHandle:
    """A supervisor, as the runner sees it."""

    # The number of its first unit, by which its parent knows it.
    number: int
    channel: Channel[supervisor_messages.FromSupervisor]


@dataclass(eq=False)
class FileHandle:
    """The process of one test file, as the runner sees it."""

    preloaded_server: PreloadedServerClient
    name: str
    devices: int
    # The file for the output of the process while it imports the test file.
    log: Path
    load_as: LoadAs
    state: FileState = FileState.CLOSED
    contents: FileContents = FileContents()
    _process: _Process | None = None
    # Start units, when the process is ready.
    _waiting: list[Callable[[], None]] = field(default_factory=list)
    # The imports of this file during which the preloaded server has died.
    lost_imports: int = 0
    # The preloaded server's numbers of units that are interpreters.
    _interpreters: dict[int, int] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return self.preloaded_server.root / self.name

    @property
    def reads(self) -> Path:
        """The record of the files that its import reads."""
        return self.log.with_suffix(".reads")

    def _become(self, wanted: FileState) -> None:
        self.state = after(self.state, wanted)
        if self._process is not None and self.state is not FileState.OPENING:
            self._process.deadline.cancel()

    def open(self) -> None:
        """Start the process, which imports the file and lists its tests."""
        assert self.state is FileState.CLOSED
        # Or OSError: the next unit tries again.
        ours, theirs = socket_pair()
        channel: Channel[fork_parent_messages.FromFile] = Channel(ours, fork_parent_messages.FromFile)
        request = partial(
            fork_parent_messages.OpenFile,
            root=str(self.preloaded_server.root),
            path=str(self.path),
            file=self.name,
            devices=self.devices,
            log=str(self.log),
            reads=str(self.reads),
            load_as=self.load_as,
        )
        units = RequestedChildren(self.preloaded_server.loop)
        self._process = process = _Process(channel, self.preloaded_server.starts, units)
        with theirs:
            process.number = self.preloaded_server.start_child(request, partial(self._end, process), theirs.fileno())
        # At its end, the preloaded server reports how the process has ended.
        self.preloaded_server.loop.serve(channel, partial(self._on_message, process), lambda: None)
        process.deadline = self.preloaded_server.loop.after(FILE_IMPORT_TIMEOUT, self._give_up)
        self._become(FileState.OPENING)

    def _open_again(self) -> None:
        try:
            self.open()
        except OSError as error:
            self._break(f"its process could not be started: {error}")

    # -- messages

    def _on_message(self, process: _Process, message: fork_parent_messages.FromFile) -> None:
        """Handle what the process of the file reports."""
        match message:
            case fork_parent_messages.FileTests(tests, not_run, warnings):
                self.contents = FileContents(
                    tests, not_run, unsafe=self.contents.unsafe, of_import=warnings, is_listed=True
                )
            case fork_parent_messages.FileSkipped(reason, want):
                self._become_skipped(reason, want)
            case fork_parent_messages.FileReady():
                self._become(FileState.READY)
                self._start_waiting()
            case fork_parent_messages.FileUnsafe(why):
                self._become(FileState.UNSAFE)
                slow = f"each test of {self.name} runs in a new interpreter, which takes seconds, because {why}"
                self.contents = dataclasses.replace(self.contents, unsafe=slow)
            case fork_parent_messages.FileBroken(failure):
                self._break(failure)
            case fork_parent_messages.ChildGone(number):
                self.preloaded_server.note_progress()
                for supervisor in [supervisor for supervisor in process.free if supervisor.number == number]:
                    process.free.remove(supervisor)
                    supervisor.channel.close()
                process.units.on_end(number, message.how)
            case _:
                unexpected(message)

    def _become_skipped(self, reason: str, want: str | None) -> None:
        if self.contents.tests:
            self._break(f"its tests were listed, but it skips itself when it is imported again: {reason}")
            return
        self._become(FileState.SKIPPED)
        self.contents = FileContents((Test(TestId(self.name), skip=reason, want=want),), is_listed=True)

    def _give_up(self) -> None:
        assert self._process is not None
        self._break(f"importing the file took more than {FILE_IMPORT_TIMEOUT:.0f} s; the process was killed")
        self.preloaded_server.kill(self._process.number)

    def _break(self, why: FailureView | str) -> None:
        self._become(FileState.BROKEN)
        failure = FailureView.of_text(why) if isinstance(why, str) else why
        broken = Attempt(Test(TestId(self.name)), TestEnd(TestOutcome.ERROR, failure=failure), output=tail(self.log))
        self.contents = dataclasses.replace(self.contents, broken=broken)
        self._start_waiting()

    # -- the end of the process

    def _end(self, process: _Process, how: str) -> None:
        """Handle the end of the process, with everything that it started."""
        if self._process is not process:
            # It was closed; there may be another process by now.
            return
        for message in process.channel.receive_available():
            self._on_message(process, message)
        if self.state is FileState.OPENING:
            with_preloaded_server = (
                process.preloaded_server_start != self.preloaded_server.starts and self.preloaded_server.failure is None
            )
            self.lost_imports += with_preloaded_server
            if not with_preloaded_server or self.lost_imports > MOST_LOST_IMPORTS:
                self._break(
                    self.preloaded_server.failure or f"the process that imports the file {how} during the import"
                )
        lost = process.units.take_all()
        self.close()
        for gone in lost:
            gone(how)
        # The import was lost with the preloaded server.
        if self._waiting and self.state is FileState.CLOSED:
            self._open_again()

    def close(self) -> None:
        """End the process; no unit may be running. It is restarted for the next unit."""
        self._become(FileState.CLOSED)
        process, self._process = self._process, None
        if process is not None:
            process.units.take_all()
            self._dismiss(process)
            self.preloaded_server.loop.forget(process.channel)
            process.channel.close()

    def abandon(self) -> None:
        """End the process, which may be importing the file."""
        if self._process is not None:
            self.preloaded_server.kill(self._process.number)
        self.close()

    # -- units

    def add_preload_hints(self, modules: tuple[str, ...]) -> None:
        """Have modules that a unit had to import itself preloaded for the next units."""
        if self._process is not None and self.state is FileState.READY:
            self._process.channel.send(fork_parent_messages.PreloadModules(modules))
            self._dismiss(self._process)

    def _dismiss(self, process: _Process) -> None:
        """Give the supervisors that there are no other unit."""
        for supervisor in process.free:
            supervisor.channel.close()
        process.free = []
        process.fresh.clear()

    def start(
        self,
        unit: unit_spec.UnitSpec,
        worker: socket,
        gone: Gone,
        locks: tuple[int, ...] = (),
    ) -> SupervisorHandle:
        """Start a unit, as soon as the file is imported. Returns its supervisor. The socket goes to its worker.

        The supervisor also gets the locks of its devices: descriptors, which the unit's lease keeps open until it is
        gone. `gone` is called when no process of it is left; never before this method has returned.
        """
        if self.state is FileState.CLOSED:
            self.open()
        if self._process is not None and self._process.free:
            supervisor = self._process.free.pop()
            with worker:
                request = fork_parent_messages.StartUnit(supervisor.number, unit)
                fds = (worker.fileno(), *locks)
                self._process.units.request(supervisor.number, gone, supervisor.channel, request, *fds)
            return supervisor
        ours, theirs = socket_pair()
        self._waiting.append(partial(self._start, unit, theirs, worker, gone, locks))
        if self.state is not FileState.OPENING:
            # If it is, the unit starts when the file has been imported.
            self._start_waiting()
        return SupervisorHandle(unit.number, Channel(ours, supervisor_messages.FromSupervisor))

    def _start_waiting(self) -> None:
        waiting = self._waiting
        self._waiting = []
        for start in waiting:
            start()

    def _start(
        self, unit: unit_spec.UnitSpec, supervisor: socket, worker: socket, gone: Gone, locks: tuple[int, ...]
    ) -> None:
        """Start a unit with another supervisor."""
        with supervisor, worker:
            fds = (supervisor.fileno(), worker.fileno(), *locks)
            match self.state:
                case FileState.UNSAFE:
                    request = partial(fork_parent_messages.StartUnit, unit=unit)
                    self._interpreters[unit.number] = self.preloaded_server.start_child(request, gone, *fds)
                case FileState.READY if self._process is not None:
                    self._process.fresh.add(unit.number)
                    start = fork_parent_messages.StartUnit(unit.number, unit)
                    self._process.units.request(unit.number, gone, self._process.channel, start, *fds)
                case _:
                    self.preloaded_server.loop.after(0.0, partial(gone, "could not be started"))

    def release(self, supervisor: SupervisorHandle) -> None:
        """The unit of a supervisor is over: it is free for another one, if it lives, and lacks no module."""
        process = self._process
        was_running = process is not None and process.units.forget(supervisor.number)
        if process is None or not was_running or supervisor.number not in process.fresh:
            supervisor.channel.close()
            return
        self.preloaded_server.note_progress()
        process.free.append(supervisor)

    def kill(self, supervisor: SupervisorHandle) -> None:
        """Kill a supervisor that does not answer."""
        if supervisor.number in self._interpreters:
            self.preloaded_server.kill(self._interpreters[supervisor.number])
        elif self._process is not None:
            self._process.channel.send(fork_parent_messages.Kill(supervisor.number))


@dataclass(eq=False)
class _Process:
    """One process of the file, and the units that it runs."""

    channel: Channel[fork_parent_messages.FromFile]
    # The preloaded server that has started the process, by its number.
    preloaded_server_start: int
    # The units, by the numbers of their supervisors.
    units: RequestedChildren
    # The number by which the preloaded server knows it.
    number: int = -1
    # The deadline of the import.
    deadline: Timer = field(default_factory=lambda: Timer(0.0, lambda: None))
    # The supervisors that can watch another unit.
    free: list[SupervisorHandle] = field(default_factory=list)
    # Numbers of supervisors that have all modules that the process has.
    fresh: set[int] = field(default_factory=set)
