"""Stages: a tree of processes that have imported modules, and fork programs for clients.

The first one, the server, has imported nothing; one below it torch; one below that this package. A stage checks before
each program that no file it has read has changed, and that its imports would have read the same variables; if one has,
it ends, and the stage above forks a new one. What an import does besides reading (threads, child processes, files that
it writes or keeps open, output) makes a stage unfit: then the stage above forks the program.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import math
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable

from torch_testing_ext._process import reaping, system

from . import handover, warm_program
from .handover import (
    ForkProgram,
    Message,
    OtherVariables,
    RunCold,
    RunProgram,
    StageAnswer,
    StageBuilt,
    Stale,
    StartedAgain,
    Taken,
)
from .keeper import keep
from .read_record import ReadRecord
from .stashed_modules import RecordingEnviron, Stash, StashedLayer, native
from .warm_program import FreshInterpreter, ProgramRequest

_PACKAGE = __name__.partition(".")[0]
_OURS = (
    f"{_PACKAGE}.common_utils",
    f"{_PACKAGE}.common_distributed",
    f"{_PACKAGE}.pytest_plugin",
    f"{_PACKAGE}.launch.fork_server",
    f"{_PACKAGE}._pytest_ranks.in_parent",
    f"{_PACKAGE}._pytest_ranks.item_in_rank",
)
# The modules of the stages, from top to bottom.
MODULES = (("torch",), ("unittest", "expecttest", "pytest", *_OURS))
_MOST_CHILDREN = 2
_BUILD_TIMEOUT = 60.0
_SETTLING = 2.5


class ProgramBegins(BaseException):
    """Unwinds a fork of a stage to the interpreter's lowest frame, which runs the program."""

    def __init__(self, run: Callable[[], Callable[[], object]]):
        super().__init__()
        self.run = run


class Stage:
    """The process of a stage."""

    def __init__(self, depth: int, notes: int, fresh: FreshInterpreter, stash: Stash):
        """`notes`: a descriptor on which programs tell the server why they had to start again."""
        self.depth, self._notes, self._fresh, self._stash = depth, notes, fresh, stash
        self.children: list[socket.socket] = []
        self.record = ReadRecord()
        self._layers: list[StashedLayer] = []
        self._control: socket.socket | None = None
        # Why no stage below is fit, and when to try again.
        self.fault, self._retry_at = "", 0.0

    # -- imports

    def build(self, environ: dict[str, str]) -> str | None:
        """Import the modules. Returns why this process is unfit; None if it is fit."""
        before, written = _Traces(), self.record.record_reads()
        os.chdir("/")
        os.environ.clear()
        os.environ.update(environ)
        self._layers = [self._import(name, environ) for name in MODULES[self.depth - 1]]
        self.record.stop()
        self.record.add_modules([name for layer in self._layers for name in layer.modules])
        gc.collect()
        # The collections of programs do not write to shared pages.
        gc.freeze()
        why = before.fault(written)
        system.collapse_all()
        return why

    def _import(self, module: str, environ: dict[str, str]) -> StashedLayer:
        """Import a module, and note what that has read and changed."""
        before, filters = dict(os.environ), [*warnings.filters]
        RecordingEnviron.begin()
        # A program that needs it will report the error.
        with contextlib.suppress(Exception):
            importlib.import_module(module)
        # What an earlier import has set depends on what that one has read.
        seen = {name: before.get(name) for name in RecordingEnviron.end() if before.get(name) == environ.get(name)}
        puts = {name: value for name, value in os.environ.items() if before.get(name) != value}
        layer = StashedLayer(self._stash.new_names(), module, seen, puts)
        if module == "torch":
            layer.native = native(environ)
        layer.filters = [added for added in warnings.filters if added not in filters]
        warnings.filters[:] = filters  # type: ignore[index]
        self._stash.add(layer)
        return layer

    # -- requests

    def serve(self, control: socket.socket) -> None:
        """Serve the stage above until it is gone. In a program, ProgramBegins comes out of this."""
        reap_children()
        self._control = control
        while True:
            try:
                request, fds = handover.receive(control)
            except (EOFError, OSError):
                os._exit(0)
            assert isinstance(request, ForkProgram)
            answer = self.answer(request, fds)
            with contextlib.suppress(OSError):
                handover.send(control, answer)
            if isinstance(answer, Stale):
                os._exit(0)
            for fd in fds:
                os.close(fd)

    def answer(self, request: ForkProgram, fds: list[int]) -> StageAnswer:
        """Have the program run: by a stage below, or by this one. The first of `fds` is the client."""
        environ = request.seen_by_imports
        if self.record.changed() is not None:
            return Stale()
        if any(layer.changed(environ) for layer in self._layers):
            return OtherVariables()
        if self.depth < len(MODULES) and self._is_taken_below(request, fds):
            return Taken()
        if self.depth == 0:
            return RunCold(self.fault)
        if os.fork() == 0:
            self._become_program(request.program, fds)
        return Taken()

    def _is_taken_below(self, request: ForkProgram, fds: list[int]) -> bool:
        """Have the program run by a stage below: by one that is there, or else by a new one."""
        for child in [*self.children]:
            if self._takes(child, request, fds):
                return True
        below = self._fork_stage(request.seen_by_imports)
        return below is not None and self._takes(below, request, fds)

    def _takes(self, child: socket.socket, request: ForkProgram, fds: list[int]) -> bool:
        """Ask a stage below. One that is stale, or gone, is not asked again."""
        answer: Message
        try:
            handover.send(child, request, fds)
            answer, _ = handover.receive(child)
        except (EOFError, OSError):
            answer = Stale()
        if isinstance(answer, Stale):
            self.children.remove(child)
            child.close()
        return isinstance(answer, Taken)

    def _fork_stage(self, environ: dict[str, str]) -> socket.socket | None:
        """Fork a stage below, with its modules imported. Returns None if it is unfit."""
        if time.monotonic() < self._retry_at:
            return None
        while len(self.children) >= _MOST_CHILDREN:
            self.children.pop(0).close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, handover.KIND)
        above = os.getpid()
        if os.fork() == 0:
            try:
                # Also while it imports.
                system.die_with(above, signal.SIGKILL)
                self._become_stage(theirs.fileno(), environ)
            except Exception:
                # The stage above is gone, or does not want this one any more.
                os._exit(1)
        theirs.close()
        ours.settimeout(_BUILD_TIMEOUT)
        try:
            built, _ = handover.receive(ours)
            assert isinstance(built, StageBuilt)
        except (EOFError, OSError):
            built = StageBuilt("the process that imports torch ended early, or took too long", young=None)
        self.fault = built.fault or ""
        if self.fault or built.young:
            self._retry_at = math.inf if self.fault else time.monotonic() + _SETTLING
            ours.close()
            return None
        self.children.append(ours)
        return ours

    def _become_stage(self, control: int, environ: dict[str, str]) -> None:
        """Be the stage below, in a fork of this one. In a program, ProgramBegins comes out of it."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._close_others([control])
        # The modules of the server stay its own.
        if self.depth == 0:
            for name in [*sys.modules]:
                if name.partition(".")[0] == _PACKAGE:
                    del sys.modules[name]
            self._stash.add(StashedLayer(self._stash.new_names()))
            sys.path[:] = self._fresh.path
        sock = socket.socket(fileno=control)
        stage = Stage(self.depth + 1, self._notes, self._fresh, self._stash)
        fault = stage.build(environ)
        young = stage.record.unsettled()
        handover.send(sock, StageBuilt(fault, young))
        if fault or young:
            os._exit(0)
        stage.serve(sock)

    def _become_program(self, program: RunProgram, fds: list[int]) -> None:
        """Fork the program from this process, which becomes its keeper. In the program, raises ProgramBegins."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._notes = fcntl.fcntl(self._notes, fcntl.F_DUPFD_CLOEXEC, warm_program.FAR + len(fds))
        self._close_others(fds)
        client, *of_the_program = fds
        request = ProgramRequest(program, of_the_program)
        try:
            keep(socket.socket(fileno=client), request.close, program.leads, program.adopts)
            run = warm_program.become(request, self._fresh, self._stash, self._tell)
        except BaseException:
            os._exit(1)
        raise ProgramBegins(run)

    def _close_others(self, kept: list[int]) -> None:
        """Close the descriptors of this process but for these, the standard ones and that for notes."""
        for item in gc.get_objects():
            if type(item) is socket.socket:
                # It must not close a descriptor of a program when it is collected.
                item.detach()
        # It is exempt from collection.
        if self._control is not None:
            self._control.detach()
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in (0, 1, 2, self._notes, *kept):
                # It was the listing's own.
                with contextlib.suppress(OSError):
                    os.close(int(name))
        self.children = []

    def _tell(self, note: StartedAgain) -> None:
        with contextlib.suppress(OSError):
            os.write(self._notes, handover.encode(note))


def reap_children() -> None:
    """Have children that end leave nothing behind."""

    def reap_all(number: int, frame: object) -> None:
        for _ in reaping.reap():
            pass

    signal.signal(signal.SIGCHLD, reap_all)


class _Traces:
    """Finds the traces that an import leaves besides modules."""

    def __init__(self) -> None:
        self._fds = len(os.listdir("/proc/self/fd"))
        self._output = os.memfd_create("output")
        self._null = os.dup(1)
        for number in (1, 2):
            os.dup2(self._output, number)

    def fault(self, written: list[str]) -> str | None:
        """Why a process with these imports cannot stand for one that does them itself; None if it can."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        printed = os.pread(self._output, 200, 0).decode(errors="replace").strip()
        for number in (1, 2):
            os.dup2(self._null, number)
        os.close(self._null)
        os.close(self._output)
        if printed:
            return f"an import of torch or of this package prints: {printed.splitlines()[0]}"
        if written:
            return f"an import of torch or of this package writes {written[0]}"
        if system.children(os.getpid()) or len(os.listdir("/proc/self/fd")) != self._fds:
            return "an import of torch or of this package starts a process, or leaves a file open"
        # Libraries that can do without their threads end them before a fork.
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        if system.threads() > 1:
            return "an import of torch or of this package starts threads"
        return None
