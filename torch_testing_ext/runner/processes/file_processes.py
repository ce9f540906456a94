"""The preloaded server and the processes of the test files, as run_test.py sees them."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from socket import socket
from typing import IO, Any, TypeVar

from torch_testing_ext._collectives.failure import FailureView
from torch_testing_ext._process import ends, file_reads, interpreters, system
from torch_testing_ext._process.channels import Channel, socket_pair
from torch_testing_ext._process.event_loop import EventLoop, Timer
from torch_testing_ext._process.logs import tail
from torch_testing_ext._process.messages import unexpected
from torch_testing_ext._process.private_folders import locked_folder
from torch_testing_ext._process.requested_children import Gone, RequestedChildren
from torch_testing_ext._testing.bases.unittest_and_pytest import facts_of
from torch_testing_ext.runner.model import Attempt, Test, TestEnd, TestId, TestOutcome, Unit
from torch_testing_ext.runner.options import CannotRun
from torch_testing_ext.warm.served_process import ServedProcess
from torch_testing_ext.warm.warm_client import ServerAddress

from . import worker_messages
from .worker_messages import (
    ChildGone,
    CountDevices,
    DevicesCounted,
    FromPreloadedServer,
    Kill,
    LoadAs,
    PreloadedServerReady,
)

# --------------------------------------------------------------------------------------------------------------------
# The preloaded server, seen from run_test.py: its imports, its start, restart and end, and how it starts children.
#
# A preloaded server that dies is restarted at once; the processes that it started die with it. When it cannot be
# started any more, everything that asks for a child is told the reason. Never imports torch.

START_TIMEOUT = 300.0
QUIT_TIMEOUT = 5.0
# How often in a row the preloaded server may die. It has died in a row if no child has ended by itself in between.
MOST_DEATHS = 20
# In a row, of a preloaded server that was ready before.
MOST_FAILED_STARTS = 3

ALWAYS = ("torch", "torch.distributed", "torch_testing_ext.common_distributed")
_FSDP = "torch_testing_ext.common_fsdp"
_DTENSOR = "torch_testing_ext.distributed._tensor.common_dtensor"
_DYNAMO = "torch_testing_ext._testing.bases.dynamo_imported"
# With so many tests, files are worth a larger preparation.
_MANY = 8

Self = TypeVar("Self", bound="PreloadedServerClient")


@dataclass(frozen=True)
class WarmUp:
    """The preparations of the preloaded server. The default is for files that are not known."""

    modules: tuple[str, ...] = (*ALWAYS, _FSDP, _DTENSOR)
    # Its memory: this takes up to half a second, and makes each fork 5 to 15 ms faster, of which a test needs several.
    collapse: bool = True
    # That forks the preloaded server.
    server: ServerAddress | None = None


def warm_up_for(root: Path, files: Iterable[str]) -> WarmUp:
    """Choose what saves time for these files, given relative to the root.

    What no file uses is not imported: FSDP and DTensor take half as long as torch itself, and dynamo as long again. The
    process of a file that imports more does so itself. Dynamo is imported if half of the files use it: all other files
    would wait for it, and each process that is forked gets larger by a tenth.
    """
    facts = [facts_of(str(root / name)) for name in files]
    modules = list(ALWAYS)
    if any(file.fsdp for file in facts):
        modules.append(_FSDP)
    if any(file.dtensor for file in facts):
        modules.append(_DTENSOR)
    using_dynamo = sum(file.dynamo for file in facts)
    if facts and 2 * using_dynamo >= len(facts):
        modules.append(_DYNAMO)
    are_many = any(file.generates for file in facts) or sum(file.tests for file in facts) >= _MANY
    return WarmUp(tuple(modules), are_many)


@dataclass(eq=False)
class PreloadedServerClient:
    """The client of the preloaded server, from which all processes of the run descend."""

    root: Path
    warm_up: WarmUp = WarmUp()
    # The root is a PyTorch checkout, whose tests get our classes under PyTorch's names.
    drop_in: bool = False
    # That all processes get, besides that of this process.
    environ: Mapping[str, str] = field(default_factory=dict)
    quit_timeout: float = QUIT_TIMEOUT
    # The folder for temporary files, if it is not the usual one.
    base: str | None = None
    loop: EventLoop = field(default_factory=EventLoop)
    directory: Path = Path()
    starts: int = 0
    # Whether the preloaded server has been forked by a server.
    is_warm: bool = False
    # Why no child can be started any more.
    failure: str | None = None
    _folder: ExitStack = field(default_factory=ExitStack)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    children: RequestedChildren = field(init=False)
    _process: subprocess.Popen[bytes] | ServedProcess | None = None
    _channel: Channel[FromPreloadedServer] = field(init=False)
    # Of the start; none has begun.
    _deadline: Timer = field(default_factory=lambda: Timer(0.0, lambda: None))
    _ready: bool = False
    # In a row.
    _deaths: int = 0
    # In a row.
    _failed_starts: int = 0

    def __post_init__(self) -> None:
        self.children = RequestedChildren(self.loop)

    def __enter__(self: Self) -> Self:
        # If the preloaded server is killed, this process adopts those that it leaves.
        system.adopt_orphans()
        self._known = frozenset(system.children(os.getpid()))
        try:
            self.directory = self._folder.enter_context(locked_folder("torch_testing_ext_run_", self.base))
        except OSError as error:
            raise CannotRun(f"no temporary folder can be created: {system.why_refused(error)}") from error
        self._start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes of the run."""
        self._end_process()
        self.loop.close()
        self._folder.close()

    def may_be_ours(self, pid: int) -> bool:
        """May this process be one of a test? Every one of those descends from this process or the preloaded server.

        Where NVML has other numbers than this process, or a warm server has forked the preloaded one, any may.
        """
        if self.is_warm or not system.has_pids_of_host():
            return True
        # NVML may still know a process of a test that has ended.
        is_gone = not os.path.exists(f"/proc/{pid}")
        return is_gone or pid == os.getpid() or pid in system.descendants(os.getpid())

    # -- the process

    def _start(self) -> None:
        """Start the preloaded server, which says when it is ready."""
        self.starts += 1
        ours, theirs = socket_pair()
        self._channel = Channel(ours, FromPreloadedServer)
        words = [str(theirs.fileno()), str(os.getpid()), str(self.directory), str(int(self.drop_in))]
        words += [str(int(self.warm_up.collapse)), *self.warm_up.modules]
        # A checkout has a folder torch/ that is not the installed torch.
        path = sys.path if self.drop_in else [str(self.root), *sys.path]
        command = interpreters.command("runner.processes.preloaded_server", path, *words)
        self._ready = False
        with theirs:
            try:
                with self._log.open("ab") as log:
                    self._process = self._spawn(command, log, theirs.fileno())
            except OSError as error:
                self._fail(f"the process that imports torch for all tests cannot be started: {error}")
                return
        self._deadline = self.loop.after(START_TIMEOUT, self._give_up)
        self.loop.serve(self._channel, self._on_message, self._lose)

    def _spawn(self, command: list[str], log: IO[bytes], kept: int) -> subprocess.Popen[bytes] | ServedProcess:
        """Have a warm server fork the preloaded server, or start a new interpreter."""
        environ = {**os.environ, **self.environ}
        served = None
        if self.warm_up.server is not None:
            served = ServedProcess.start(self.warm_up.server, command, log.fileno(), kept, environ)
        self.is_warm = served is not None
        if served is not None:
            return served
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[kept],
            env=environ,
        )

    def _end_process(self) -> int | None:
        """End the process, and those that its children leave. Each ends what it started when its channel closes."""
        self._deadline.cancel()
        self.loop.forget(self._channel)
        self._channel.close()
        process, self._process = self._process, None
        code = None
        if process is not None:
            try:
                code = process.wait(self.quit_timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
        ends.end_children(self._known)
        return code

    @property
    def _log(self) -> Path:
        return self.directory / "preloaded_server.log"

    def _give_up(self) -> None:
        self._fail(
            f"the process that imports torch for all tests was not ready after {START_TIMEOUT:.0f} s. "
            f"Its output:\n{tail(self._log)}"
        )

    def _on_message(self, message: FromPreloadedServer) -> None:
        match message:
            case ChildGone(number):
                self.note_progress()
                self.children.on_end(number, message.how)
            case PreloadedServerReady(None):
                self._ready = True
                self._failed_starts = 0
                self._deadline.cancel()
            case PreloadedServerReady(unsafe):
                self._fail(f"the process that has imported torch cannot be forked: {unsafe}")
            case _:
                unexpected(message)

    def note_progress(self) -> None:
        """A child has ended by itself."""
        self._deaths = 0

    def _lose(self) -> None:
        """Handle the death of the preloaded server: end the processes that its children left, and restart it."""
        how = ends.describe_exit(self._end_process())
        self._deaths += 1
        self._failed_starts += not self._ready
        never_ready = not self._ready and self.starts == self._failed_starts
        if never_ready or self._failed_starts > MOST_FAILED_STARTS or self._deaths > MOST_DEATHS:
            times = f", {self._deaths} times in a row" if self._deaths > 1 else ""
            self._fail(f"the process that imports torch for all tests {how}{times}. Its output:\n{tail(self._log)}")
            return
        lost = self.children.take_all()
        self._start()
        for gone in lost:
            gone(how)

    def _fail(self, why: str) -> None:
        """Start no child any more: everything that waits for one, or asks for one, is told that it is gone."""
        self.failure = why
        self._end_process()
        for gone in self.children.take_all():
            gone(why)

    def start_child(self, request: Callable[[int], Any], gone: Gone, *fds: int) -> int:
        """Have the preloaded server start a child. Returns the child's number.

        `request` makes the message from the number. `gone` is called when the child has ended, together with
        everything that it started, or could not be started; never before this method has returned.
        """
        number = next(self._numbers)
        if self.failure is not None:
            self.loop.after(0.0, partial(gone, self.failure))
            return number
        self.children.request(number, gone, self._channel, request(number), *fds)
        return number

    def kill(self, number: int) -> None:
        if self.failure is None:
            self._channel.send(Kill(number))


# --------------------------------------------------------------------------------------------------------------------
# The process of one test file, as run_test.py sees it. Never imports torch.
#
# A process that dies is restarted when it is needed again; the processes that it started die with it.

IMPORT_TIMEOUT = 120.0
# How often a file may be imported when the preloaded server dies.
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
    remark: str = ""

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.unsafe, self.remark)))


@dataclass(eq=False)
class SupervisorHandle:
    """A supervisor, as run_test.py sees it."""

    # Of its first unit: by that, its parent knows it.
    number: int
    channel: Channel[worker_messages.FromSupervisor]


@dataclass(eq=False)
class FileHandle:
    """The process of one test file, as run_test.py sees it."""

    preloaded_server: PreloadedServerClient
    name: str
    devices: int
    # For the output of the process while it imports the file.
    log: Path
    load_as: worker_messages.LoadAs
    state: FileState = FileState.CLOSED
    contents: FileContents = FileContents()
    _process: _Process | None = None
    # Start units, when the process is ready.
    _waiting: list[Callable[[], None]] = field(default_factory=list)
    # With which the preloaded server has died.
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
        channel: Channel[worker_messages.FromFile] = Channel(ours, worker_messages.FromFile)
        request = partial(
            worker_messages.OpenFile,
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
        process.deadline = self.preloaded_server.loop.after(IMPORT_TIMEOUT, self._give_up)
        self._become(FileState.OPENING)

    def _open_again(self) -> None:
        try:
            self.open()
        except OSError as error:
            self._break(f"its process could not be started: {error}")

    # -- messages

    def _on_message(self, process: _Process, message: worker_messages.FromFile) -> None:
        """Handle what the process of the file reports."""
        match message:
            case worker_messages.FileTests(tests, not_run, remark):
                nothing = "" if tests or not_run else f"{self.name} has no tests: unittest finds none in it"
                self.contents = FileContents(tests, not_run, unsafe=self.contents.unsafe, remark=remark or nothing)
            case worker_messages.FileNeedsPytest():
                self.load_as = dataclasses.replace(self.load_as, by_pytest=True)
                # It ends: pytest imports the file in another one.
                self.close()
                self._open_again()
            case worker_messages.FileSkipped(reason, want):
                self._become_skipped(reason, want)
            case worker_messages.FileReady():
                self._become(FileState.READY)
                self._start_waiting()
            case worker_messages.FileUnsafe(why):
                self._become(FileState.UNSAFE)
                slow = f"each test of {self.name} runs in a new interpreter, which takes seconds, because {why}"
                self.contents = dataclasses.replace(self.contents, unsafe=slow)
            case worker_messages.FileBroken(failure):
                self._break(failure)
            case worker_messages.ChildGone(number):
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
        self.contents = FileContents(tests=(Test(TestId(self.name), skip=reason, want=want),))

    def _give_up(self) -> None:
        assert self._process is not None
        self._break(f"importing the file took more than {IMPORT_TIMEOUT:.0f} s; the process was killed")
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
        if self._process is not process:
            # pytest imports the file in another one.
            return
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

    # -- units

    def add_preload_hints(self, modules: tuple[str, ...]) -> None:
        """Have modules that a unit had to import itself preloaded for the next units."""
        if self._process is not None and self.state is FileState.READY:
            self._process.channel.send(worker_messages.PreloadModules(modules))
            self._dismiss(self._process)

    def _dismiss(self, process: _Process) -> None:
        """Give the supervisors that there are no other unit."""
        for supervisor in process.free:
            supervisor.channel.close()
        process.free = []
        process.fresh.clear()

    def start(
        self,
        unit: worker_messages.UnitSpec,
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
                request = worker_messages.StartUnit(supervisor.number, unit)
                fds = (worker.fileno(), *locks)
                self._process.units.request(supervisor.number, gone, supervisor.channel, request, *fds)
            return supervisor
        ours, theirs = socket_pair()
        self._waiting.append(partial(self._start, unit, theirs, worker, gone, locks))
        if self.state is not FileState.OPENING:
            # If it is, the unit starts when the file has been imported.
            self._start_waiting()
        return SupervisorHandle(unit.number, Channel(ours, worker_messages.FromSupervisor))

    def _start_waiting(self) -> None:
        waiting = self._waiting
        self._waiting = []
        for start in waiting:
            start()

    def _start(
        self, unit: worker_messages.UnitSpec, supervisor: socket, worker: socket, gone: Gone, locks: tuple[int, ...]
    ) -> None:
        """Start a unit with another supervisor."""
        with supervisor, worker:
            fds = (supervisor.fileno(), worker.fileno(), *locks)
            match self.state:
                case FileState.UNSAFE:
                    request = partial(worker_messages.StartUnit, unit=unit)
                    self._interpreters[unit.number] = self.preloaded_server.start_child(request, gone, *fds)
                case FileState.READY if self._process is not None:
                    self._process.fresh.add(unit.number)
                    start = worker_messages.StartUnit(unit.number, unit)
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
            self._process.channel.send(worker_messages.Kill(supervisor.number))


@dataclass(eq=False)
class _Process:
    """One process of the file, and the units that it runs."""

    channel: Channel[worker_messages.FromFile]
    # Which of the preloaded servers has started the process.
    preloaded_server_start: int
    # By the numbers of their supervisors.
    units: RequestedChildren
    # By which the preloaded server knows it.
    number: int = -1
    # Of the import.
    deadline: Timer = field(default_factory=lambda: Timer(0.0, lambda: None))
    # That can watch another unit.
    free: list[SupervisorHandle] = field(default_factory=list)
    # Numbers of supervisors that have all modules that the process has.
    fresh: set[int] = field(default_factory=set)


# --------------------------------------------------------------------------------------------------------------------
# The processes of all test files, and what is found in these, as run_test.py sees them. Never imports torch.

Reads = dict[TestId, dict[str, str] | None]
# Longer than each of the ways to ask the driver takes.
COUNT_TIMEOUT = 200.0
# Processes of files that wait for their first unit.
MOST_OPEN = 32


@dataclass(frozen=True)
class Discovery:
    """The tests found by importing the test files, and what cannot be run."""

    # Of a file that skips itself, one that stands for all of them.
    tests: tuple[Test, ...]
    # Files that could not be imported.
    broken: tuple[Attempt, ...]
    # Tests that unittest does not run.
    not_run: tuple[Attempt, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(eq=False)
class FileProcesses(PreloadedServerClient):
    """The processes of test files, and the preloaded server above them: `with FileProcesses(root) as files:`."""

    # Find tests, too, that pytest's own options deselect by their marks.
    all_marks: bool = False
    # Known when devices have been counted.
    torch_version: str = ""
    _files: dict[str, FileHandle] = field(default_factory=dict)
    _reads: Reads = field(default_factory=dict)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        super().close()

    def count_devices(self) -> DevicesCounted:
        """Ask torch about the accelerators. Raises CannotRun if that cannot be found out."""
        ours, theirs = socket_pair()
        channel: Channel[DevicesCounted] = Channel(ours, DevicesCounted)
        answers: list[DevicesCounted] = []
        ended: list[str] = []

        self.loop.serve(channel, answers.append, lambda: None)
        with theirs:
            child = self.start_child(CountDevices, ended.append, theirs.fileno())
        until = time.monotonic() + COUNT_TIMEOUT
        while not (ended or answers) and time.monotonic() < until:
            self.loop.step(until)
        # An answer is enough: a process that the driver blocks may not end.
        if not ended:
            self.kill(child)
        self.loop.forget(channel)
        channel.close()
        if self.failure is not None:
            raise CannotRun(self.failure)
        if not answers and not ended:
            raise CannotRun(f"the driver of the accelerators has not answered within {COUNT_TIMEOUT:.0f} s")
        if not answers:
            raise CannotRun(f"the process that counts accelerators ended without an answer:\n{tail(self._log)}")
        if answers[0].failure:
            raise CannotRun(answers[0].failure)
        self.torch_version = answers[0].torch
        return answers[0]

    def discover(
        self,
        files: Iterable[str],
        devices: int = 0,
        jobs: int | None = None,
        tell: Callable[[list[str], int], object] = lambda importing, left: None,
    ) -> Discovery:
        """Import files (relative to the root) and list their tests. `devices`: the number of devices of the run.

        `tell` gets the names of the files that are being imported, and the number of those that are not yet.
        """
        handles = [self.file(name, devices) for name in files]
        waiting = deque(file for file in handles if file.state is FileState.CLOSED)
        opening: list[FileHandle] = []
        most_opening = jobs or system.cores()
        while waiting or opening:
            # Those that were lost with the preloaded server are imported one at a time, so that only the culprit dies
            # again.
            has_died = any(file.lost_imports for file in (*opening, *waiting))
            most_now = 1 if has_died else most_opening
            while waiting and len(opening) < most_now:
                file = waiting.popleft()
                opening.append(file)
                file.open()
            tell([file.name for file in opening], len(waiting) + len(opening))
            self.loop.step()
            waiting.extendleft(file for file in opening if file.state is FileState.CLOSED)
            opening = [file for file in opening if file.state is FileState.OPENING]
            self._keep_few_open(handles)
        return self._discovery(handles)

    def _discovery(self, files: Iterable[FileHandle]) -> Discovery:
        tests: list[Test] = []
        broken: list[Attempt] = []
        not_run: list[Attempt] = []
        for file in files:
            tests += file.contents.tests
            not_run += file.contents.not_run
            if file.contents.broken is not None:
                broken.append(file.contents.broken)
        return Discovery(tuple(tests), tuple(broken), tuple(not_run), self.warnings)

    def _keep_few_open(self, files: Iterable[FileHandle]) -> None:
        """Close processes beyond MOST_OPEN, to save memory. Their files are imported again when their units start."""
        ready = [file for file in files if file.state is FileState.READY]
        for file in ready[MOST_OPEN:]:
            file.close()

    def note_reads(self, unit: Unit, record: Path) -> None:
        """Keep what a unit has read, before its folder goes."""
        files = self._reads_in(record)
        for test in unit.tests:
            self._reads[test.id] = file_reads.merged(self._reads.get(test.id, {}), files)

    def _reads_in(self, record: Path) -> dict[str, str] | None:
        """The files in a record, without those of this run itself."""
        files = file_reads.read_record(record)
        if files is None:
            return None
        own = f"{self.directory}{os.sep}"
        return {path: content for path, content in files.items() if not path.startswith(own)}

    def reads(self) -> Reads:
        """The files that tests and imports have read so far, by test, or by file of tests; None if that is unknown."""
        reads: Reads = {}
        for name, file in self._files.items():
            reads[TestId(name)] = self._reads_in(file.reads)
        reads.update(self._reads)
        return reads

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(text for file in self._files.values() for text in file.contents.warnings)

    def file(self, name: str, devices: int = 0) -> FileHandle:
        if name not in self._files:
            # A path may be too long for the name of a file.
            log = self.directory / f"import{len(self._files)}.log"
            self._files[name] = FileHandle(self, name, devices, log, LoadAs(all_marks=self.all_marks))
        return self._files[name]
