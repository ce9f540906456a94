"""The process of one test file, as run_test.py sees it. Never imports torch.

A process that dies is restarted when it is needed again; the processes that it started die with it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from socket import socket

from torch_testing_ext._process.channel import Channel, socket_pair
from torch_testing_ext._process.logs import tail
from torch_testing_ext._process.loop import Timer
from torch_testing_ext._process.messages import unexpected

from ..model import Attempt, Test, TestId, TestOutcome
from .worker_messages import (
    ChildGone,
    FileBroken,
    FileNeedsPytest,
    FileReady,
    FileSkipped,
    FileTests,
    FileUnsafe,
    FromFile,
    Kill,
    LoadAs,
    OpenFile,
    PreloadModules,
    StartUnit,
    UnitSpec,
)
from .zygote_client import Gone, ZygoteClient

IMPORT_TIMEOUT = 120.0
MOST_LOST_IMPORTS = 3  # how often a file may be imported when the zygote dies


class FileState(enum.Enum):
    """The current state of the process of a test file."""

    CLOSED = "closed"
    OPENING = "opening"
    RELOADING = "ends, so that pytest imports the file in another one"
    SUSPECT = "to be imported again, alone"  # the zygote died during its import
    READY = "ready"
    UNSAFE = "not safe to fork"  # its units are new interpreters
    SKIPPED = "skips all of its tests"
    BROKEN = "broken"


class FileEvent(enum.Enum):
    """A change of the process of a test file."""

    OPENED = "its process was started"
    NEEDS_PYTEST = "it has tests for pytest"
    IMPORTED = "its process is ready to fork"
    UNSAFE = "its process cannot be forked"
    SKIPPED = "it skips itself"
    FAILED = "it cannot be imported"
    LOST = "the zygote died during its import"
    ENDED = "its process has ended, or was closed"


# Any other event changes nothing: a file that is broken, say, stays so when its process ends.
_AFTER = {
    (FileState.CLOSED, FileEvent.OPENED): FileState.OPENING,
    (FileState.CLOSED, FileEvent.FAILED): FileState.BROKEN,  # its process could not be started
    (FileState.SUSPECT, FileEvent.OPENED): FileState.OPENING,
    (FileState.OPENING, FileEvent.NEEDS_PYTEST): FileState.RELOADING,
    (FileState.OPENING, FileEvent.IMPORTED): FileState.READY,
    (FileState.OPENING, FileEvent.UNSAFE): FileState.UNSAFE,
    (FileState.OPENING, FileEvent.SKIPPED): FileState.SKIPPED,
    (FileState.OPENING, FileEvent.FAILED): FileState.BROKEN,
    (FileState.OPENING, FileEvent.LOST): FileState.SUSPECT,
    (FileState.OPENING, FileEvent.ENDED): FileState.CLOSED,
    (FileState.RELOADING, FileEvent.FAILED): FileState.BROKEN,
    (FileState.RELOADING, FileEvent.ENDED): FileState.CLOSED,
    (FileState.READY, FileEvent.UNSAFE): FileState.UNSAFE,
    (FileState.READY, FileEvent.ENDED): FileState.CLOSED,
}
# A unit waits until one of these is over.
_IMPORTING = (FileState.OPENING, FileState.RELOADING, FileState.SUSPECT)


def after(state: FileState, event: FileEvent) -> FileState:
    return _AFTER.get((state, event), state)


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


class FileHandle:
    """The process of one test file, as run_test.py sees it."""

    def __init__(
        self,
        zygote: ZygoteClient,
        name: str,
        devices: int,
        log: Path,
        load_as: LoadAs,
        import_again: Callable[[FileHandle], object],
    ):
        """`log`: for the output of the process while it imports the file. `import_again`: takes a suspect."""
        self.name = name
        self.state = FileState.CLOSED
        self.contents = FileContents()
        self.load_as = load_as
        self._log = log
        self._zygote = zygote
        self._devices = devices
        self._import_again = import_again
        self._process: _Process | None = None
        self._waiting: list[_Start] = []  # units to be started when the process is ready
        self._lost_imports = 0
        self._imported: Callable[[], object] | None = None
        self._interpreters: dict[int, int] = {}  # the zygote's numbers of units that are interpreters

    @property
    def path(self) -> Path:
        return self._zygote.root / self.name

    @property
    def is_importing(self) -> bool:
        return self.state in _IMPORTING

    def _become(self, event: FileEvent) -> None:
        self.state = after(self.state, event)
        if self._process is not None and self.state not in (FileState.OPENING, FileState.RELOADING):
            self._process.deadline.cancel()

    def open(self, imported: Callable[[], object] | None = None) -> None:
        """Start the process, which imports the file and lists its tests. `imported` is called after the import."""
        assert self.state in (FileState.CLOSED, FileState.SUSPECT)
        ours, theirs = socket_pair()  # or OSError: the next unit tries again
        self._imported = imported
        channel: Channel[FromFile] = Channel(ours, FromFile)
        request = partial(
            OpenFile,
            root=str(self._zygote.root),
            path=str(self.path),
            file=self.name,
            devices=self._devices,
            log=str(self._log),
            load_as=self.load_as,
        )
        self._process = process = _Process(channel, self._zygote.starts)
        with theirs:
            process.number = self._zygote.start_child(request, partial(self._end, process), theirs.fileno())
        self._zygote.loop.listen(channel, partial(self._receive, process))
        process.deadline = self._zygote.loop.after(IMPORT_TIMEOUT, self._give_up)
        self._become(FileEvent.OPENED)

    # -- messages

    def _receive(self, process: _Process) -> None:
        try:
            messages = process.channel.receive()
        except EOFError:
            self._zygote.loop.forget(process.channel)  # the zygote will report how the process ended
            return
        for message in messages:
            self._on_message(message, process)

    def _on_message(self, message: FromFile, process: _Process) -> None:
        match message:
            case FileTests(tests, not_run, remark):
                self._take_tests(tests, not_run, remark)
            case FileNeedsPytest():
                self.load_as = dataclasses.replace(self.load_as, by_pytest=True)
                self._become(FileEvent.NEEDS_PYTEST)
            case FileSkipped(reason, want):
                self._become_skipped(reason, want)
            case FileReady(unsafe):
                if unsafe is not None:
                    self._become_unsafe(unsafe)
                self._become(FileEvent.IMPORTED)
                self._end_import()
                self._start_waiting()
            case FileUnsafe(why):
                self._become_unsafe(why)
            case FileBroken(text):
                self._break(text)
            case ChildGone(number):
                self._zygote.note_progress()
                process.units.pop(number, _ignore)(message.how)
            case _:
                unexpected(message)

    def _take_tests(self, tests: tuple[Test, ...], not_run: tuple[Attempt, ...], remark: str) -> None:
        nothing = "" if tests or not_run else f"{self.name} has no tests: unittest finds none in it"
        self.contents = dataclasses.replace(
            self.contents,
            tests=tests,
            not_run=not_run,
            remark=remark or nothing,
        )

    def _become_skipped(self, reason: str, want: str | None) -> None:
        if self.contents.tests:
            self._break(f"its tests were listed, but it skips itself when it is imported again: {reason}")
            return
        self._become(FileEvent.SKIPPED)
        self.contents = FileContents(tests=(Test(TestId(self.name), skip=reason, want=want),))
        self._end_import()

    def _become_unsafe(self, why: str) -> None:
        self._become(FileEvent.UNSAFE)
        slow = f"each test of {self.name} runs in a new interpreter, which takes seconds, because {why}"
        self.contents = dataclasses.replace(self.contents, unsafe=slow)

    def _give_up(self) -> None:
        assert self._process is not None
        self._break(f"importing the file took more than {IMPORT_TIMEOUT:.0f} s; the process was killed")
        self._zygote.kill(self._process.number)

    def _break(self, message: str) -> None:
        self._become(FileEvent.FAILED)
        broken = Attempt(Test(TestId(self.name)), TestOutcome.ERROR, message, output=tail(self._log))
        self.contents = dataclasses.replace(self.contents, broken=broken)
        self._end_import()
        self._start_waiting()

    def _end_import(self) -> None:
        imported, self._imported = self._imported, None
        if imported is not None:
            imported()

    # -- the end of the process

    def _end(self, process: _Process, how: str) -> None:
        """Handle the end of the process, with everything that it started."""
        if self._process is not process:
            return  # it was closed; there may be another process by now
        for message in process.channel.receive_available():
            self._on_message(message, process)
        if self.state is FileState.RELOADING:
            self.close()
            self._reopen()
            return
        if self.state is FileState.OPENING:
            if self._is_victim(process):
                self._end_import()
                self._become(FileEvent.LOST)
            else:
                self._break(self._zygote.failure or f"the process that imports the file {how} during the import")
        lost = process.units
        self.close()
        for gone in lost.values():
            gone(how)
        if self.state is FileState.SUSPECT:
            self._import_again(self)

    def _reopen(self) -> None:
        try:
            self.open(self._imported)
        except OSError as error:
            self._break(f"its process could not be started: {error}")

    def _is_victim(self, process: _Process) -> bool:
        """Whether the import ended only because the zygote died, so that another attempt may succeed."""
        self._lost_imports += 1
        died = process.zygote_start != self._zygote.starts
        return died and self._zygote.failure is None and self._lost_imports <= MOST_LOST_IMPORTS

    def close(self) -> None:
        """End the process; no unit may be running. It is restarted for the next unit."""
        self._become(FileEvent.ENDED)
        process, self._process = self._process, None
        if process is not None:
            process.units = {}
            self._zygote.loop.forget(process.channel)
            process.channel.close()

    # -- units

    def add_preload_hints(self, modules: tuple[str, ...]) -> None:
        """Have modules that a unit had to import itself preloaded for the next units."""
        if self._process is not None and self.state is FileState.READY:
            self._process.channel.send(PreloadModules(modules))

    def start(self, unit: UnitSpec, nanny: socket, worker: socket, gone: Gone, locks: tuple[int, ...] = ()) -> None:
        """Start a unit. The sockets go to its nanny and worker; the nanny also gets the locks of its devices.

        `gone` is called when no process of it is left; never before this method has returned.
        """
        if self.state is FileState.CLOSED:
            self.open()
        self._waiting.append(_Start(unit, nanny, worker, gone, locks))
        if not self.is_importing:  # else when it has been imported
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
                self._interpreters[number] = self._zygote.start_child(request, one.gone, *fds)
            case FileState.READY if self._process is not None:
                units = self._process.units
                units[number] = one.gone
                try:
                    self._process.channel.send(StartUnit(number, one.unit), *fds)
                except OSError as error:
                    self._zygote.loop.after(0.0, partial(units.pop(number), f"could not be started: {error}"))
            case _:
                self._zygote.loop.after(0.0, partial(one.gone, "could not be started"))

    def kill(self, unit: int) -> None:
        """Kill the nanny of a unit that does not answer."""
        if unit in self._interpreters:
            self._zygote.kill(self._interpreters[unit])
        elif self._process is not None:
            self._process.channel.send(Kill(unit))


def _ignore(how: str) -> None:
    """Do nothing when a child ends that no caller waits for."""


class _Process:
    """One process of the file, and the units that it runs."""

    def __init__(self, channel: Channel[FromFile], zygote_start: int):
        """`zygote_start`: which of the zygotes has started the process."""
        self.channel = channel
        self.zygote_start = zygote_start
        self.number = -1  # by which the zygote knows it
        self.deadline = Timer(0.0, lambda: None)  # of the import
        self.units: dict[int, Gone] = {}


@dataclass(frozen=True)
class _Start:
    """A unit to be started, with the channel ends that go to its processes."""

    unit: UnitSpec
    nanny: socket
    worker: socket
    gone: Gone
    locks: tuple[int, ...]  # descriptors, which the unit's lease keeps open until it is gone
