"""The zygote, seen from run_test.py: its imports, its start, restart and end, and how it starts children.

A zygote that dies is restarted at once; the processes that it started die with it. When it cannot be started any more,
everything that asks for a child is told the reason. Never imports torch.
"""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

from torch_testing_ext._cases.source_facts import facts_of
from torch_testing_ext._process import interpreter, reaping, system
from torch_testing_ext._process.channel import Channel, socket_pair
from torch_testing_ext._process.logs import tail
from torch_testing_ext._process.loop import EventLoop, Timer
from torch_testing_ext._process.messages import unexpected
from torch_testing_ext._process.private_folders import locked_folder
from torch_testing_ext.warm.served_process import ServedProcess
from torch_testing_ext.warm.warm_client import ServerAddress

from ..options.options import CannotRun
from .worker_messages import ChildGone, FromZygote, Kill, ZygoteReady

START_TIMEOUT = 300.0
QUIT_TIMEOUT = 5.0
# How often in a row the zygote may die. It has died in a row if no child has ended by itself in between.
MOST_DEATHS = 20
# In a row, of a zygote that was ready before.
MOST_FAILED_STARTS = 3

ALWAYS = ("torch", "torch.distributed", "torch_testing_ext.common_distributed")
_FSDP = "torch_testing_ext.common_fsdp"
_DTENSOR = "torch_testing_ext.distributed._tensor.common_dtensor"
_DYNAMO = "torch_testing_ext._cases.dynamo_imported"
# With so many tests, files are worth a larger preparation.
_MANY = 8

# Called when a child has ended, with a description of how it ended.
Gone = Callable[[str], object]
Self = TypeVar("Self", bound="ZygoteClient")


@dataclass(frozen=True)
class WarmUp:
    """The preparations of the zygote. The default is for files that are not known."""

    modules: tuple[str, ...] = (*ALWAYS, _FSDP, _DTENSOR)
    # Its memory: this takes up to half a second, and makes each fork 5 to 15 ms faster, of which a test needs several.
    collapse: bool = True
    # That forks the zygote.
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
class ZygoteClient:
    """The client of the zygote, from which all processes of the run descend."""

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
    # Whether the zygote has been forked by a server.
    is_warm: bool = False
    # Why no child can be started any more.
    failure: str | None = None
    _folder: ExitStack = field(default_factory=ExitStack)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    # By number of child.
    _gone: dict[int, Gone] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | ServedProcess | None = None
    _channel: Channel[FromZygote] = field(init=False)
    # Of the start; none has begun.
    _deadline: Timer = field(default_factory=lambda: Timer(0.0, lambda: None))
    _ready: bool = False
    # In a row.
    _deaths: int = 0
    # In a row.
    _failed_starts: int = 0

    def __enter__(self: Self) -> Self:
        # If the zygote is killed, this process adopts those that it leaves.
        system.adopt_orphans()
        self._known = frozenset(system.children(os.getpid()))
        try:
            self.directory = self._folder.enter_context(locked_folder("torch_testing_ext_run_", self.base))
        except OSError as error:
            raise CannotRun(f"no temporary folder can be created: {error}") from error
        self._start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes of the run."""
        self._end_process()
        self.loop.close()
        self._folder.close()

    # -- the process

    def _start(self) -> None:
        """Start the zygote, which says when it is ready."""
        self.starts += 1
        ours, theirs = socket_pair()
        self._channel = Channel(ours, FromZygote)
        words = [str(theirs.fileno()), str(os.getpid()), str(self.directory), str(int(self.drop_in))]
        words += [str(int(self.warm_up.collapse)), *self.warm_up.modules]
        # A checkout has a folder torch/ that is not the installed torch.
        path = sys.path if self.drop_in else [str(self.root), *sys.path]
        command = interpreter.command("runner.processes.zygote_process", path, *words)
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
        """Have a warm server fork the zygote, or start a new interpreter."""
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
        reaping.end_children(self._known)
        return code

    @property
    def _log(self) -> Path:
        return self.directory / "zygote.log"

    def _give_up(self) -> None:
        self._fail(
            f"the process that imports torch for all tests was not ready after {START_TIMEOUT:.0f} s. "
            f"Its output:\n{tail(self._log)}"
        )

    def _on_message(self, message: FromZygote) -> None:
        match message:
            case ChildGone(number):
                self.note_progress()
                self._gone.pop(number, ignore)(message.how)
            case ZygoteReady(None):
                self._ready = True
                self._failed_starts = 0
                self._deadline.cancel()
            case ZygoteReady(unsafe):
                self._fail(f"the process that has imported torch cannot be forked: {unsafe}")
            case _:
                unexpected(message)

    def note_progress(self) -> None:
        """A child has ended by itself."""
        self._deaths = 0

    def _lose(self) -> None:
        """Handle the death of the zygote: end the processes that its children left, and restart it."""
        how = reaping.describe_exit(self._end_process())
        self._deaths += 1
        self._failed_starts += not self._ready
        never_ready = not self._ready and self.starts == self._failed_starts
        if never_ready or self._failed_starts > MOST_FAILED_STARTS or self._deaths > MOST_DEATHS:
            times = f", {self._deaths} times in a row" if self._deaths > 1 else ""
            self._fail(f"the process that imports torch for all tests {how}{times}. Its output:\n{tail(self._log)}")
            return
        lost, self._gone = self._gone, {}
        self._start()
        for gone in lost.values():
            gone(how)

    def _fail(self, why: str) -> None:
        """Start no child any more: everything that waits for one, or asks for one, is told that it is gone."""
        self.failure = why
        self._end_process()
        lost, self._gone = self._gone, {}
        for gone in lost.values():
            gone(why)

    def start_child(self, request: Callable[[int], Any], gone: Gone, *fds: int) -> int:
        """Have the zygote start a child. Returns the child's number.

        `request` makes the message from the number. `gone` is called when the child has ended, together with
        everything that it started, or could not be started; never before this method has returned.
        """
        number = next(self._numbers)
        if self.failure is not None:
            self.loop.after(0.0, partial(gone, self.failure))
            return number
        self._gone[number] = gone
        try:
            self._channel.send(request(number), *fds)
        except OSError as error:
            self.loop.after(0.0, partial(self._gone.pop(number), f"could not be started: {error}"))
        return number

    def kill(self, number: int) -> None:
        if self.failure is None:
            self._channel.send(Kill(number))


def ignore(how: str) -> None:
    """Do nothing when a child ends that no caller waits for."""
