"""The processes of test files, as run_test.py sees them. Never imports torch.

A process that dies is restarted when it is needed again; the processes that it started die with it.
"""

from __future__ import annotations

import dataclasses
import enum
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from socket import socket

from torch_testing_ext._process import system
from torch_testing_ext._process.channel import Channel, socket_pair
from torch_testing_ext._process.logs import tail
from torch_testing_ext._process.messages import unexpected

from ..model import Attempt, Test, TestId, TestOutcome
from ..options.options import CannotRun
from .protocol import (
    ChildGone,
    CountDevices,
    DevicesCounted,
    FileBroken,
    FileNeedsPytest,
    FileReady,
    FileSkipped,
    FileTests,
    FileUnsafe,
    FromFile,
    Kill,
    OpenFile,
    PreloadModules,
    StartUnit,
    TestNotRun,
)
from .unit_spec import LoadAs, UnitSpec
from .warm_up import WarmUp
from .zygote_client import Gone, ZygoteClient

IMPORT_PATIENCE = 120.0
COUNT_PATIENCE = 200.0  # longer than each of the ways to ask the driver takes
MOST_LOST_IMPORTS = 3  # how often a file may be imported when the zygote dies
MOST_OPEN = 32  # processes of files that wait for their first unit


@dataclass(frozen=True)
class Discovery:
    """The tests found by importing the test files, and what cannot be run."""

    tests: tuple[Test, ...]  # of a file that skips itself, one that stands for all of them
    broken: tuple[Attempt, ...]  # files that could not be imported
    not_run: tuple[Attempt, ...] = ()  # tests that unittest does not run
    warnings: tuple[str, ...] = ()


class FileState(enum.Enum):
    """The current state of the process of a test file."""

    CLOSED = "closed"
    OPENING = "opening"
    SUSPECT = "to be imported again, alone"  # the zygote died during its import
    READY = "ready"
    UNSAFE = "not safe to fork"  # its units are new interpreters
    SKIPPED = "skips all of its tests"
    BROKEN = "broken"


class Zygote(ZygoteClient):
    """The zygote and the processes of test files: `with Zygote(root) as zygote:`."""

    def __init__(self, root: Path, warm_up: WarmUp | None = None, drop_in: bool = False, all_marks: bool = False):
        """`all_marks`: find tests, too, that pytest's own options deselect by their marks."""
        super().__init__(root, warm_up, drop_in)
        self.all_marks = all_marks
        self.torch_version = ""  # known when devices have been counted
        self.devices_seen = DevicesCounted(None, 0)  # known when devices have been counted
        self._files: dict[str, FileHandle] = {}
        self._suspects: deque[FileHandle] = deque()

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        super().close()

    def count_devices(self) -> tuple[str | None, int]:
        """The kind of the visible accelerators ("cuda", "hip", "xpu", ...), and their number."""
        ours, theirs = socket_pair()
        channel: Channel[DevicesCounted] = Channel(ours, DevicesCounted)
        answers: list[DevicesCounted] = []
        ended: list[str] = []

        def listen() -> None:
            with suppress(EOFError):
                answers.extend(channel.receive())
            self.loop.forget(channel)

        self.loop.listen(channel, listen)
        with theirs:
            child = self.start_child(CountDevices, ended.append, theirs.fileno())
        until = time.monotonic() + COUNT_PATIENCE
        while not ended:
            # An answer is enough: a process that the driver blocks may not end.
            if (not self.loop.step(until) and time.monotonic() >= until) or any(one.failure for one in answers):
                self.kill(child)
                break
        channel.close()
        if self.failure is not None:
            raise CannotRun(self.failure)
        if not ended:
            why = answers[0].failure if answers else ""
            raise CannotRun(why or f"the driver of the accelerators has not answered within {COUNT_PATIENCE:.0f} s")
        if answers and answers[0].failure:
            raise CannotRun(answers[0].failure)
        if not answers:
            raise CannotRun(f"the process that counts accelerators ended without an answer:\n{tail(self._log)}")
        self.torch_version = answers[0].torch
        self.devices_seen = answers[0]
        return answers[0].kind, answers[0].count

    def discover(self, files: Iterable[str], devices: int = 0, jobs: int | None = None) -> Discovery:
        """Import files (relative to the root) and list their tests. `devices`: the number of devices of the run."""
        opened = [self.file(name, devices) for name in files]
        waiting = deque(file for file in opened if file.state is FileState.CLOSED)
        opening: list[FileHandle] = []
        while waiting or opening:
            while waiting and len(opening) < (jobs or system.cores()):
                opening.append(waiting.popleft())
                opening[-1].open()
            self.loop.step()
            opening = [file for file in opening if file.state in (FileState.OPENING, FileState.SUSPECT)]
            self._keep_few_open(opened)
        tests = tuple(test for file in opened for test in file.tests)
        broken = tuple(file.broken for file in opened if file.broken is not None)
        not_run = tuple(attempt for file in opened for attempt in file.not_run)
        return Discovery(tests, broken, not_run, self.warnings)

    def _keep_few_open(self, files: Iterable[FileHandle]) -> None:
        """Close processes beyond MOST_OPEN, to save memory. Their files are imported again when their units start."""
        for file in [file for file in files if file.state is FileState.READY][MOST_OPEN:]:
            file.close()

    def import_again(self, file: FileHandle) -> None:
        """Import a file during whose import the zygote died. One at a time, so that only the culprit dies again."""
        self._suspects.append(file)
        self._import_next_suspect()

    def _import_next_suspect(self) -> None:
        if self._suspects and self._suspects[0].state is FileState.SUSPECT:
            self._suspects[0].open(self._end_suspicion)

    def _end_suspicion(self) -> None:
        self._suspects.popleft()
        self._import_next_suspect()

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(text for file in self._files.values() for text in (file.warning, file.remark) if text)

    def file(self, name: str, devices: int = 0) -> FileHandle:
        if name not in self._files:
            log = self.directory / f"import{len(self._files)}.log"  # a path may be too long for the name of a file
            self._files[name] = FileHandle(self, name, devices, log)
        return self._files[name]


class FileHandle:
    """The process of one test file, as run_test.py sees it."""

    def __init__(self, zygote: Zygote, name: str, devices: int, log: Path):
        """`log`: for the output of the process while it imports the file."""
        self.name = name
        self.state = FileState.CLOSED
        self.tests: tuple[Test, ...] = ()
        self.not_run: tuple[Attempt, ...] = ()
        self.broken: Attempt | None = None
        self.warning = ""
        self.remark = ""
        self.load_as = LoadAs(all_marks=zygote.all_marks)
        self._log = log
        self._zygote = zygote
        self._devices = devices
        self._channel: Channel[FromFile] | None = None
        self._number = -1
        self._waiting: list[_Start] = []  # units to be started when the process is ready
        self._gone: dict[int, Gone] = {}
        self._start_of_zygote = 0  # which of the zygotes has started the process
        self._lost_imports = 0
        self._is_left_to_pytest = False  # the process ends, and another one imports the file
        self._imported: Callable[[], object] | None = None
        self._by_zygote: dict[int, int] = {}  # the zygote's numbers of units that are interpreters

    @property
    def path(self) -> Path:
        return self._zygote.root / self.name

    def open(self, imported: Callable[[], object] | None = None) -> None:
        """Start the process, which imports the file and lists its tests. `imported` is called after the import."""
        assert self.state in (FileState.CLOSED, FileState.SUSPECT)
        ours, theirs = socket_pair()  # or OSError: the next unit tries again
        self.state = FileState.OPENING
        self._imported = imported
        self._start_of_zygote = self._zygote.starts
        self._channel = Channel(ours, FromFile)
        request = partial(
            OpenFile,
            root=str(self._zygote.root),
            path=str(self.path),
            file=self.name,
            devices=self._devices,
            log=str(self._log),
            load_as=self.load_as,
        )
        with theirs:
            self._number = self._zygote.start_child(request, partial(self._end, self._channel), theirs.fileno())
        self._zygote.loop.listen(self._channel, self._receive)
        self._deadline = self._zygote.loop.after(IMPORT_PATIENCE, self._give_up)

    def _receive(self) -> None:
        assert self._channel is not None
        try:
            messages = self._channel.receive()
        except EOFError:
            self._zygote.loop.forget(self._channel)  # the zygote will report how the process ended
            return
        for message in messages:
            self._on_message(message)

    def _on_message(self, message: FromFile) -> None:
        match message:
            case FileTests(tests, not_run, remark):
                self._take_tests(tests, not_run, remark)
            case FileNeedsPytest():
                self.load_as = dataclasses.replace(self.load_as, by_pytest=True)
                self._is_left_to_pytest = True
            case FileSkipped(reason, want):
                self._become_skipped(reason, want)
            case FileReady(unsafe):
                self._become_ready(unsafe)
            case FileUnsafe(why):
                self._become_unsafe(why)
            case FileBroken(text):
                self._break(text)
            case ChildGone(number):
                self._zygote.note_progress()
                self._gone.pop(number, _ignore)(message.how)
            case _:
                unexpected(message)

    def _take_tests(self, tests: tuple[Test, ...], not_run: tuple[TestNotRun, ...], remark: str) -> None:
        self.tests = tests
        self.not_run = tuple(Attempt(one.test, TestOutcome.ERROR, one.why) for one in not_run)
        nothing = "" if tests or not_run else f"{self.name} has no tests: unittest finds none in it"
        self.remark = remark or nothing

    def _become_skipped(self, reason: str, want: str | None) -> None:
        if self.tests:
            self._break(f"its tests were listed, but it skips itself when it is imported again: {reason}")
            return
        self._deadline.cancel()
        self.state = FileState.SKIPPED
        self.tests = (Test(TestId(self.name), skip=reason, want=want),)

    def _become_ready(self, unsafe: str | None) -> None:
        self._deadline.cancel()
        self.state = FileState.READY
        if unsafe is not None:
            self._become_unsafe(unsafe)
        self._end_import()
        self._start_waiting()

    def _end_import(self) -> None:
        imported, self._imported = self._imported, None
        if imported is not None:
            imported()

    def _become_unsafe(self, why: str) -> None:
        self.state = FileState.UNSAFE
        self.warning = f"each test of {self.name} runs in a new interpreter, which takes seconds, because {why}"

    def add_preload_hints(self, modules: tuple[str, ...]) -> None:
        """Have modules that a unit had to import itself preloaded for the next units."""
        if self._channel is not None and self.state is FileState.READY:
            self._channel.send(PreloadModules(modules))

    def _give_up(self) -> None:
        self._break(f"importing the file took more than {IMPORT_PATIENCE:.0f} s; the process was killed")
        self._zygote.kill(self._number)

    def _break(self, message: str) -> None:
        self._deadline.cancel()
        self.state = FileState.BROKEN
        self.broken = Attempt(Test(TestId(self.name)), TestOutcome.ERROR, message, output=tail(self._log))
        self._end_import()
        self._start_waiting()

    def _end(self, channel: Channel[FromFile], how: str) -> None:
        """Handle the end of the process, with everything that it started."""
        if self._channel is not channel:
            return  # it was closed; there may be another process by now
        for message in self._channel.receive_available():
            self._on_message(message)
        again = False
        if self._is_left_to_pytest:
            self._is_left_to_pytest = False
            self._deadline.cancel()
            self.close()
            self.state = FileState.CLOSED
            try:
                self.open(self._imported)
            except OSError as error:
                self._break(f"its process could not be started: {error}")
            return
        if self.state is FileState.OPENING:
            again = self._is_victim()
            if again:
                self._deadline.cancel()
                self._end_import()
                self.state = FileState.SUSPECT
            else:
                self._break(self._zygote.failure or f"the process that imports the file {how} during the import")
        lost = self._gone
        self.close()
        for gone in lost.values():
            gone(how)
        if again:
            self._zygote.import_again(self)

    def _is_victim(self) -> bool:
        """Whether the import ended only because the zygote died, so that another attempt may succeed."""
        self._lost_imports += 1
        died = self._start_of_zygote != self._zygote.starts
        return died and self._zygote.failure is None and self._lost_imports <= MOST_LOST_IMPORTS

    def close(self) -> None:
        """End the process; no unit may be running. It is restarted for the next unit."""
        self._gone = {}
        if self.state is FileState.READY:
            self.state = FileState.CLOSED
        if self._channel is not None:
            self._zygote.loop.forget(self._channel)
            self._channel.close()
            self._channel = None

    def start(self, unit: UnitSpec, nanny: socket, worker: socket, gone: Gone, locks: tuple[int, ...] = ()) -> None:
        """Start a unit. The sockets go to its nanny and worker; the nanny also gets the locks of its devices.

        `gone` is called when no process of it is left; never before this method has returned.
        """
        if self.state is FileState.CLOSED:
            self.open()
        self._waiting.append(_Start(unit, nanny, worker, gone, locks))
        if self.state not in (FileState.OPENING, FileState.SUSPECT):  # else when it has been imported
            self._start_waiting()

    def _start_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            with one.nanny, one.worker:
                self._start(one, one.nanny.fileno(), one.worker.fileno(), *one.locks)

    def _start(self, one: _Start, *fds: int) -> None:
        number = one.unit.number
        match self.state:
            case FileState.UNSAFE:
                request = partial(StartUnit, unit=one.unit)
                self._by_zygote[number] = self._zygote.start_child(request, one.gone, *fds)
            case FileState.READY if self._channel is not None:
                self._gone[number] = one.gone
                try:
                    self._channel.send(StartUnit(number, one.unit), *fds)
                except OSError as error:
                    self._zygote.loop.after(0.0, partial(self._gone.pop(number), f"could not be started: {error}"))
            case _:
                self._zygote.loop.after(0.0, partial(one.gone, "could not be started"))

    def kill(self, unit: int) -> None:
        """Kill the nanny of a unit that does not answer."""
        if unit in self._by_zygote:
            self._zygote.kill(self._by_zygote[unit])
        elif self._channel is not None:
            self._channel.send(Kill(unit))


def _ignore(how: str) -> None:
    """Do nothing when a child ends that no caller waits for."""


@dataclass(frozen=True)
class _Start:
    """A unit to be started, with the channel ends that go to its processes."""

    unit: UnitSpec
    nanny: socket
    worker: socket
    gone: Gone
    locks: tuple[int, ...]  # descriptors, which the unit's lease keeps open until it is gone
