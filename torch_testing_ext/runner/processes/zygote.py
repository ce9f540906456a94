"""The zygote and the processes of test files, as run_test.py sees them. Never imports torch.

Whoever dies here is made anew when needed again; what it started dies with it.
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
from types import TracebackType

from torch_testing_ext._process import system
from torch_testing_ext._process.channel import Channel, Message
from torch_testing_ext._process.loop import Loop
from torch_testing_ext.launch import starting
from torch_testing_ext.launch.report import signal_name, tail

from ..model import Attempt, Test, TestId, TestOutcome
from ..options.options import CannotRun
from .fork_parent import end_others
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
    tests: tuple[Test, ...]
    broken: tuple[Attempt, ...]  # files that could not be imported
    warnings: tuple[str, ...] = ()


class FileState(enum.Enum):
    CLOSED = "closed"
    OPENING = "opening"
    READY = "ready"
    UNFIT = "must not be forked"  # its units are interpreters of their own
    BROKEN = "broken"


class Zygote:
    """`with Zygote(root) as zygote:`; all processes of the run descend from it."""

    def __init__(self, root: Path, preloaded: tuple[str, ...] = PRELOADED, drop_in: bool = False):
        """`drop_in`: the root is a PyTorch checkout, whose tests get our classes by PyTorch's names."""
        self.root = root
        self._drop_in = drop_in
        self.loop = Loop()
        self.directory = Path()
        self._preloaded = preloaded
        self._numbers = itertools.count()
        self._gone: dict[int, Callable[[int], object]] = {}  # whom to tell of the end of our children
        self._files: dict[str, FileHandle] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel
        self._ready = False
        self._starts = 0

    def __enter__(self) -> Zygote:
        system.adopt_orphans()  # should the zygote be killed, what it leaves comes to us
        self._known = frozenset(system.children(os.getpid()))
        self.directory = Path(tempfile.mkdtemp(prefix="torch_testing_ext_run_"))
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._channel.close()  # everybody below ends everything when he hears nothing more
        assert self._process is not None
        try:
            self._process.wait(QUIT_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        end_others(self._known)
        for file in self._files.values():
            file.close()
        self.loop.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    # -- the process

    def _start(self) -> None:
        self._starts += 1
        self._channel, theirs = Channel.pair()
        words = [str(theirs.fileno()), str(os.getpid()), str(self.directory), str(int(self._drop_in))]
        # A checkout has a folder torch/ that is not the torch which is installed.
        path = sys.path if self._drop_in else [str(self.root), *sys.path]
        command = starting.command("runner.processes.zygote_process", path, *words, *self._preloaded)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[theirs.fileno()]
            )
        theirs.close()
        self._ready = False
        self.loop.listen(self._channel, self._listen)

    @property
    def _log(self) -> Path:
        return self.directory / "zygote.log"

    def _listen(self) -> None:
        try:
            messages = self._channel.receive()
        except EOFError:
            self._lose()
            return
        for message in messages:
            if "gone" in message:
                self._gone.pop(message["gone"], lambda status: None)(message["status"])
            elif message["ready"] is not None:
                raise CannotRun(f"the process that has imported torch cannot be forked: {message['ready']}")
            else:
                self._ready = True

    def _lose(self) -> None:
        """It died, and so did all its children: what they did not end themselves has come to us."""
        self.loop.forget(self._channel)
        self._channel.close()
        assert self._process is not None
        code = self._process.wait()
        end_others(self._known)
        if not self._ready or self._starts > MOST_RESTARTS:
            how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with code {code}"
            raise CannotRun(f"the process that imports torch for all tests {how}. It said:\n{tail(self._log)}")
        self._start()
        lost, self._gone = self._gone, {}
        for tell in lost.values():
            tell(signal.SIGKILL)

    def send(self, order: str, gone: Callable[[int], object], *fds: int, **details: object) -> int:
        """Have it start a child; `gone` is called with its wait status once nothing is left of it."""
        number = next(self._numbers)
        self._gone[number] = gone
        self._channel.send({"order": order, "number": number, **details}, *fds)
        return number

    def kill(self, number: int) -> None:
        self._channel.send({"order": "kill", "number": number})

    # -- what it is for

    def count_devices(self) -> tuple[str | None, int]:
        """The kind of the accelerators that can be seen from here ("cuda", "hip", "xpu", ...), and how many."""
        ours, theirs = Channel.pair()
        answers: list[Message] = []
        ended: list[int] = []

        def listen() -> None:
            with suppress(EOFError):
                answers.extend(ours.receive())
            self.loop.forget(ours)

        self.loop.listen(ours, listen)
        self.send("count", ended.append, theirs.fileno())
        theirs.close()
        while not ended:
            self.loop.step()
        ours.close()
        if not answers:
            raise CannotRun(f"the process that counts accelerators ended without an answer:\n{tail(self._log)}")
        return answers[0]["kind"], answers[0]["count"]

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
    """The process of one test file."""

    def __init__(self, zygote: Zygote, name: str, devices: int):
        self.name = name
        self.state = FileState.CLOSED
        self.tests: tuple[Test, ...] = ()
        self.broken: Attempt | None = None
        self.warning = ""
        self._zygote = zygote
        self._devices = devices
        self._channel: Channel | None = None
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
        assert self.state is FileState.CLOSED
        self.state = FileState.OPENING
        self._channel, theirs = Channel.pair()
        self._number = self._zygote.send(
            "open",
            partial(self._end, self._channel),
            theirs.fileno(),
            root=str(self._zygote.root),
            path=str(self.path),
            file=self.name,
            devices=self._devices,
            log=str(self._log),
        )
        theirs.close()
        self._zygote.loop.listen(self._channel, self._listen)
        self._deadline = self._zygote.loop.after(IMPORT_PATIENCE, self._give_up)

    def _listen(self) -> None:
        assert self._channel is not None
        try:
            messages = self._channel.receive()
        except EOFError:
            self._zygote.loop.forget(self._channel)  # more is known when the zygote tells of its end
            return
        for message in messages:
            self._hear(message)

    def _hear(self, message: Message) -> None:
        if "tests" in message:
            self.tests = tuple(_test_of(data) for data in message["tests"])
        elif "ready" in message:
            self._open(message["ready"])
        elif "unfit" in message:
            self._become_unfit(message["unfit"])
        elif "broken" in message:
            self._break(message["broken"])
        elif "gone" in message:
            self._gone.pop(message["gone"], lambda status: None)(message["status"])

    def _open(self, unfit: str | None) -> None:
        self._deadline.cancel()
        self.state = FileState.READY
        if unfit is not None:
            self._become_unfit(unfit)
        self._start_waiting()

    def _become_unfit(self, why: str) -> None:
        self.state = FileState.UNFIT
        self.warning = f"each test of {self.name} is a new interpreter, which takes seconds, since {why}"

    def teach(self, modules: list[str]) -> None:
        """What a unit had to import by itself, the next ones shall find imported."""
        if self._channel is not None and self.state is FileState.READY:
            self._channel.send({"order": "preload", "modules": modules})

    def _give_up(self) -> None:
        self._break(f"importing it took more than {IMPORT_PATIENCE:.0f} s; it was given up")
        self._zygote.kill(self._number)

    def _break(self, message: str) -> None:
        self._deadline.cancel()
        self.state = FileState.BROKEN
        self.broken = Attempt(Test(TestId(self.name)), TestOutcome.ERROR, message, output=tail(self._log))
        self._start_waiting()

    def _end(self, channel: Channel, status: int) -> None:
        """Its process is gone, with all that it started."""
        if self._channel is not channel:
            return  # it was sent away; there may be another by now
        for message in self._channel.receive_available():
            self._hear(message)
        if self.state is FileState.OPENING:
            code = os.waitstatus_to_exitcode(status)
            how = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
            self._break(f"the process that imported it {how} while it did")
        lost = self._gone
        self.close()
        for tell in lost.values():
            tell(status)

    def close(self) -> None:
        """Send its process away; no unit is running. It is made anew when one is to be started."""
        self._gone = {}
        if self.state is FileState.READY:
            self.state = FileState.CLOSED
        if self._channel is not None:
            self._zygote.loop.forget(self._channel)
            self._channel.close()
            self._channel = None

    def start(self, order: UnitSpec, nanny: Channel, worker: Channel, gone: Callable[[int], object]) -> None:
        """Start a unit. The channels are the unit's; `gone` is called when nothing is left of it."""
        if self.state is FileState.CLOSED:
            self.open()
        self._waiting.append(_Start(order, nanny, worker, gone))
        if self.state is not FileState.OPENING:
            self._start_waiting()

    def _start_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            fds = (one.nanny.fileno(), one.worker.fileno())
            if self.state is FileState.UNFIT:
                number = self._zygote.send("unit", one.gone, *fds, unit=one.order.as_data())
                self._by_zygote[one.order.number] = number
            elif self._channel is not None and self.state is FileState.READY:
                self._gone[one.order.number] = one.gone
                self._channel.send({"order": "unit", "unit": one.order.as_data()}, *fds)
            one.nanny.close()
            one.worker.close()
            if self.state is FileState.BROKEN:
                one.gone(0)

    def kill(self, unit: int) -> None:
        """End the nanny of a unit that does not answer."""
        if unit in self._by_zygote:
            self._zygote.kill(self._by_zygote[unit])
        elif self._channel is not None:
            self._channel.send({"order": "kill", "number": unit})


@dataclass(frozen=True)
class _Start:
    """A unit to be started; the ends of its channels that go to its processes."""

    order: UnitSpec
    nanny: Channel
    worker: Channel
    gone: Callable[[int], object]


def _test_of(data: Message) -> Test:
    return Test(**{**data, "id": TestId(**data["id"])})
