"""The preloaded server as the runner sees it: its imports, its start, restart and end, and how it starts children.

A preloaded server that dies is restarted at once; the processes that it started die with it. When it cannot be
started any more, everything that asks for a child is told the reason. Never imports torch.
"""

from __future__ import annotations

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

from torch_testing_ext._process import ends, interpreters, system
from torch_testing_ext._process.channels import Channel, socket_pair
from torch_testing_ext._process.event_loop import EventLoop, Timer
from torch_testing_ext._process.logs import tail
from torch_testing_ext._process.messages import unexpected
from torch_testing_ext._process.private_folders import locked_folder
from torch_testing_ext._process.requested_children import Gone, RequestedChildren
from torch_testing_ext._testing.bases.source_facts import facts_of
from torch_testing_ext._tests import system_refusals
from torch_testing_ext.runner.options import CannotRun
from torch_testing_ext.runner.warm.warm_client import WarmProcess, WarmServer

from .fork_parent_messages import ChildGone, FromPreloadedServer, Kill, PreloadedServerReady

PRELOADED_START_TIMEOUT = 300.0
PRELOADED_QUIT_TIMEOUT = 5.0
# The most deaths of the preloaded server in a row: those between which no child has ended by itself.
MOST_DEATHS = 20
# The most failed starts in a row of a preloaded server that was ready before.
MOST_FAILED_STARTS = 3

ALWAYS = (
    "torch",
    "torch.distributed",
    "torch_testing_ext.common_distributed",
    "torch_testing_ext.launch.fork_server",
)
_PYTEST = "torch_testing_ext.runner.processes.pytest_run"
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
    # The warm server that forks the preloaded one.
    server: WarmServer | None = None


def warm_up_for(root: Path, files: Iterable[str], by_pytest: bool = False) -> WarmUp:
    """Choose what saves time for these files, given relative to the root.

    What no file uses is not imported: FSDP and DTensor take half as long as torch itself, and dynamo as long again. The
    process of a file that imports more does so itself. Dynamo is imported if half of the files use it: all other files
    would wait for it, and each process that is forked gets larger by a tenth.
    """
    facts = [facts_of(str(root / name)) for name in files]
    modules = list(ALWAYS)
    if by_pytest:
        modules.append(_PYTEST)
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
    # The variables that all processes get, besides those of this process.
    environ: Mapping[str, str] = field(default_factory=dict)
    quit_timeout: float = PRELOADED_QUIT_TIMEOUT
    # The folder for temporary files, if it is not the usual one.
    base: str | None = None
    loop: EventLoop = field(default_factory=EventLoop)
    directory: Path = Path()
    starts: int = 0
    # Whether the preloaded server has been forked by a server.
    is_warm: bool = False
    # The reason why no child can be started any more.
    failure: str | None = None
    _folder: ExitStack = field(default_factory=ExitStack)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    children: RequestedChildren = field(init=False)
    _process: subprocess.Popen[bytes] | WarmProcess | None = None
    _channel: Channel[FromPreloadedServer] = field(init=False)
    # The deadline of the start; none has begun.
    _deadline: Timer = field(default_factory=lambda: Timer(0.0, lambda: None))
    _ready: bool = False
    # The deaths in a row.
    _deaths: int = 0
    # The failed starts in a row.
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
            raise CannotRun(f"no temporary folder can be created: {system_refusals.why_refused(error)}") from error
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
        """Whether this process may be one of a test: all of those descend from this process or the preloaded server.

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
        self._deadline = self.loop.after(PRELOADED_START_TIMEOUT, self._give_up)
        self.loop.serve(self._channel, self._on_message, self._lose)

    def _spawn(self, command: list[str], log: IO[bytes], kept: int) -> subprocess.Popen[bytes] | WarmProcess:
        """Have a warm server fork the preloaded server, or start a new interpreter."""
        environ = {**os.environ, **self.environ}
        forked = None
        if self.warm_up.server is not None:
            forked = self.warm_up.server.start_run(self.directory, self.warm_up.modules, environ, kept, log.fileno())
        self.is_warm = forked is not None
        if forked is not None:
            return forked
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
        self._fail_with_output(f"was not ready after {PRELOADED_START_TIMEOUT:.0f} s")

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
            self._fail_with_output(f"{how}{times}")
            return
        lost = self.children.take_all()
        self._start()
        for gone in lost:
            gone(how)

    def _fail_with_output(self, how: str) -> None:
        output = tail(self._log) or "(none)"
        # Apart from the first line, which names what is wrong with each file.
        self._fail(f"the process that imports torch for all tests {how}\n\nIts output:\n{output}")

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
