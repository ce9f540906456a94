"""The zygote and the processes of test files, as run_test.py sees them. Never imports torch.

A process that dies is started again when it is needed again; what it started dies with it.
"""

from __future__ import annotations

import enum
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from socket import socket
from types import TracebackType
from typing import Any, assert_never

from torch_testing_ext._process import interpreter, reaping, system
from torch_testing_ext._process.channel import Channel, socket_pair
from torch_testing_ext._process.exits import describe_exit
from torch_testing_ext._process.logs import tail
from torch_testing_ext._process.loop import EventLoop, Timer

from ..model import Attempt, Test, TestId, TestOutcome
from ..options.options import CannotRun
from .protocol import (
    ChildGone,
    CountDevices,
    DevicesCounted,
    FileBroken,
    FileReady,
    FileTests,
    FileUnsafe,
    FromFile,
    FromZygote,
    Kill,
    OpenFile,
    PreloadModules,
    StartUnit,
    ZygoteReady,
)
from .unit_spec import UnitSpec

# What most test files import anyway, once for all of them.
PRELOADED = (
    "torch",
    "torch.distributed",
    "torch_testing_ext.common_distributed",
    "torch_testing_ext.common_fsdp",
    "torch_testing_ext.distributed._tensor.common_dtensor",
)
START_PATIENCE = 300.0
IMPORT_PATIENCE = 120.0
QUIT_PATIENCE = 5.0
MOST_RESTARTS = 3
MOST_OPEN = 32  # processes of files that wait for their turn


@dataclass(frozen=True)
class Discovery:
    """What importing the test files has shown."""

    tests: tuple[Test, ...]
    broken: tuple[Attempt, ...]  # files that could not be imported
    warnings: tuple[str, ...] = ()


class FileState(enum.Enum):
    """What the process of a test file can do at the moment."""

    CLOSED = "closed"
    OPENING = "opening"
    READY = "ready"
    UNSAFE = "not safe to fork"  # its units are new interpreters
    BROKEN = "broken"


class Zygote:
    """`with Zygote(root) as zygote:`; all processes of the run descend from it."""

    def __init__(self, root: Path, preloaded: tuple[str, ...] = PRELOADED, drop_in: bool = False):
        """`drop_in`: the root is a PyTorch checkout, whose tests get our classes by PyTorch's names."""
        self.root = root
        self._drop_in = drop_in
        self.loop = EventLoop()
        self.directory = Path()
        self._preloaded = preloaded
        self._numbers = itertools.count()
        self._gone: dict[int, Callable[[int], object]] = {}  # by number, what to call when a child has ended
        self._files: dict[str, FileHandle] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel[FromZygote]
        self._deadline: Timer
        self._ready = False
        self._starts = 0

    def __enter__(self) -> Zygote:
        system.adopt_orphans()  # if the zygote is killed, the processes that it leaves come to us
        self._known = frozenset(system.children(os.getpid()))
        self.directory = Path(tempfile.mkdtemp(prefix="torch_testing_ext_run_"))
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._channel.close()  # each process below ends everything that it started when its channel closes
        assert self._process is not None
        try:
            self._process.wait(QUIT_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        reaping.end_children(self._known)
        for file in self._files.values():
            file.close()
        self.loop.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    # -- the process

    def _start(self) -> None:
        self._starts += 1
        ours, theirs = socket_pair()
        self._channel = Channel(ours, FromZygote)
        words = [str(theirs.fileno()), str(os.getpid()), str(self.directory), str(int(self._drop_in))]
        # A checkout has a folder torch/ that is not the torch which is installed.
        path = sys.path if self._drop_in else [str(self.root), *sys.path]
        command = interpreter.command("runner.processes.zygote_process", path, *words, *self._preloaded)
        with self._log.open("ab") as log, theirs:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[theirs.fileno()]
            )
        self._ready = False
        self._deadline = self.loop.after(START_PATIENCE, self._give_up)
        self.loop.listen(self._channel, self._receive)

    @property
    def _log(self) -> Path:
        return self.directory / "zygote.log"

    def _give_up(self) -> None:
        raise CannotRun(
            f"the process that imports torch for all tests was not ready after {START_PATIENCE:.0f} s. "
            f"It said:\n{tail(self._log)}"
        )

    def _receive(self) -> None:
        try:
            messages = self._channel.receive()
        except EOFError:
            self._lose()
            return
        for message in messages:
            match message:
                case ChildGone(number, status):
                    self._gone.pop(number, _ignore)(status)
                case ZygoteReady(None):
                    self._ready = True
                    self._deadline.cancel()
                case ZygoteReady(unsafe):
                    raise CannotRun(f"the process that has imported torch cannot be forked: {unsafe}")
                case _:
                    assert_never(message)

    def _lose(self) -> None:
        """It died, and so did all its children: what they did not end themselves has come to us."""
        self.loop.forget(self._channel)
        self._channel.close()
        self._deadline.cancel()
        assert self._process is not None
        code = self._process.wait()
        reaping.end_children(self._known)
        if not self._ready or self._starts > MOST_RESTARTS:
            how = describe_exit(code)
            raise CannotRun(f"the process that imports torch for all tests {how}. It said:\n{tail(self._log)}")
        self._start()
        lost, self._gone = self._gone, {}
        for tell in lost.values():
            tell(signal.SIGKILL)

    def start_child(self, request: Callable[[int], Any], gone: Callable[[int], object], *fds: int) -> int:
        """Have it start a child. `request` makes the message for the child's number; `gone` is called with the child's
        wait status once nothing is left of it. Returns the number."""
        number = next(self._numbers)
        self._gone[number] = gone
        self._channel.send(request(number), *fds)
        return number

    def kill(self, number: int) -> None:
        self._channel.send(Kill(number))

    # -- what it is for

    def count_devices(self) -> tuple[str | None, int]:
        """The kind of the accelerators that can be seen from here ("cuda", "hip", "xpu", ...), and how many."""
        ours, theirs = socket_pair()
        channel: Channel[DevicesCounted] = Channel(ours, DevicesCounted)
        answers: list[DevicesCounted] = []
        ended: list[int] = []

        def listen() -> None:
            with suppress(EOFError):
                answers.extend(channel.receive())
            self.loop.forget(channel)

        self.loop.listen(channel, listen)
        with theirs:
            self.start_child(CountDevices, ended.append, theirs.fileno())
        while not ended:
            self.loop.step()
        channel.close()
        if not answers:
            raise CannotRun(f"the process that counts accelerators ended without an answer:\n{tail(self._log)}")
        return answers[0].kind, answers[0].count

    def discover(self, files: Iterable[str], devices: int = 0, jobs: int | None = None) -> Discovery:
        """Import files (relative to the root) and list their tests. `devices`: how many the run has."""
        opened = [self.file(name, devices) for name in files]
        waiting = deque(file for file in opened if file.state is FileState.CLOSED)
        opening: list[FileHandle] = []
        while waiting or opening:
            while waiting and len(opening) < (jobs or system.cores()):
                opening.append(waiting.popleft())
                opening[-1].open()
            self.loop.step()
            opening = [file for file in opening if file.state is FileState.OPENING]
            self._keep_few_open(opened)
        tests = tuple(test for file in opened for test in file.tests)
        broken = tuple(file.broken for file in opened if file.broken is not None)
        return Discovery(tests, broken, self.warnings)

    def _keep_few_open(self, files: Iterable[FileHandle]) -> None:
        """Each has memory of its own: where there are many files, one is imported again when its turn comes."""
        for file in [file for file in files if file.state is FileState.READY][MOST_OPEN:]:
            file.close()

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(file.warning for file in self._files.values() if file.warning)

    def file(self, name: str, devices: int = 0) -> FileHandle:
        if name not in self._files:
            self._files[name] = FileHandle(self, name, devices)
        return self._files[name]


class FileHandle:
    """The process of one test file, as run_test.py sees it."""

    def __init__(self, zygote: Zygote, name: str, devices: int):
        self.name = name
        self.state = FileState.CLOSED
        self.tests: tuple[Test, ...] = ()
        self.broken: Attempt | None = None
        self.warning = ""
        self._zygote = zygote
        self._devices = devices
        self._channel: Channel[FromFile] | None = None
        self._number = -1
        self._waiting: list[_Start] = []  # until it is open
        self._gone: dict[int, Callable[[int], object]] = {}
        self._by_zygote: dict[int, int] = {}  # of units that are interpreters, the zygote's numbers

    @property
    def path(self) -> Path:
        return self._zygote.root / self.name

    @property
    def _log(self) -> Path:
        """What it prints while it is imported."""
        return self._zygote.directory / f"import-{self.name.replace('/', '.')}.log"

    def open(self) -> None:
        """Start the process, which imports the file and lists its tests."""
        assert self.state is FileState.CLOSED
        self.state = FileState.OPENING
        ours, theirs = socket_pair()
        self._channel = Channel(ours, FromFile)
        request = partial(
            OpenFile,
            root=str(self._zygote.root),
            path=str(self.path),
            file=self.name,
            devices=self._devices,
            log=str(self._log),
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
            self._zygote.loop.forget(self._channel)  # more is known when the zygote reports its end
            return
        for message in messages:
            self._on_message(message)

    def _on_message(self, message: FromFile) -> None:
        match message:
            case FileTests(tests):
                self.tests = tests
            case FileReady(unsafe):
                self._become_ready(unsafe)
            case FileUnsafe(why):
                self._become_unsafe(why)
            case FileBroken(text):
                self._break(text)
            case ChildGone(number, status):
                self._gone.pop(number, _ignore)(status)
            case _:
                assert_never(message)

    def _become_ready(self, unsafe: str | None) -> None:
        self._deadline.cancel()
        self.state = FileState.READY
        if unsafe is not None:
            self._become_unsafe(unsafe)
        self._start_waiting()

    def _become_unsafe(self, why: str) -> None:
        self.state = FileState.UNSAFE
        self.warning = f"each test of {self.name} is a new interpreter, which takes seconds, since {why}"

    def add_preload_hints(self, modules: tuple[str, ...]) -> None:
        """Have the next units find imported what a unit had to import by itself."""
        if self._channel is not None and self.state is FileState.READY:
            self._channel.send(PreloadModules(modules))

    def _give_up(self) -> None:
        self._break(f"importing it took more than {IMPORT_PATIENCE:.0f} s; it was given up")
        self._zygote.kill(self._number)

    def _break(self, message: str) -> None:
        self._deadline.cancel()
        self.state = FileState.BROKEN
        self.broken = Attempt(Test(TestId(self.name)), TestOutcome.ERROR, message, output=tail(self._log))
        self._start_waiting()

    def _end(self, channel: Channel[FromFile], status: int) -> None:
        """Its process is gone, with all that it started."""
        if self._channel is not channel:
            return  # it was closed; there may be another by now
        for message in self._channel.receive_available():
            self._on_message(message)
        if self.state is FileState.OPENING:
            how = describe_exit(os.waitstatus_to_exitcode(status))
            self._break(f"the process that imported it {how} while it did")
        lost = self._gone
        self.close()
        for tell in lost.values():
            tell(status)

    def close(self) -> None:
        """End its process; no unit is running. It is started again when one is to be started."""
        self._gone = {}
        if self.state is FileState.READY:
            self.state = FileState.CLOSED
        if self._channel is not None:
            self._zygote.loop.forget(self._channel)
            self._channel.close()
            self._channel = None

    def start(self, unit: UnitSpec, nanny: socket, worker: socket, gone: Callable[[int], object]) -> None:
        """Start a unit. The sockets are the unit's; `gone` is called when nothing is left of it."""
        if self.state is FileState.CLOSED:
            self.open()
        self._waiting.append(_Start(unit, nanny, worker, gone))
        if self.state is not FileState.OPENING:
            self._start_waiting()

    def _start_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            with one.nanny, one.worker:
                self._start(one, one.nanny.fileno(), one.worker.fileno())

    def _start(self, one: _Start, *fds: int) -> None:
        number = one.unit.number
        match self.state:
            case FileState.UNSAFE:
                request = partial(StartUnit, unit=one.unit)
                self._by_zygote[number] = self._zygote.start_child(request, one.gone, *fds)
            case FileState.READY if self._channel is not None:
                self._gone[number] = one.gone
                self._channel.send(StartUnit(number, one.unit), *fds)
            case FileState.BROKEN:
                one.gone(0)

    def kill(self, unit: int) -> None:
        """Kill the nanny of a unit that does not answer."""
        if unit in self._by_zygote:
            self._zygote.kill(self._by_zygote[unit])
        elif self._channel is not None:
            self._channel.send(Kill(unit))


def _ignore(status: int) -> None:
    """Nobody waits for this child any more."""


@dataclass(frozen=True)
class _Start:
    """A unit to be started; the ends of its channels that go to its processes."""

    unit: UnitSpec
    nanny: socket
    worker: socket
    gone: Callable[[int], object]
