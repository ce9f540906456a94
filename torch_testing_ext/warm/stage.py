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
import json
import math
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

from torch_testing_ext._process import reaping, system

from . import handover, warm_program
from .keeper import keep
from .read_record import ReadRecord
from .stashed_modules import RecordingEnviron, Stash, StashedLayer, native
from .warm_program import FreshInterpreter, ProgramRequest

_OURS = (
    *("common_utils", "common_distributed", "pytest_plugin", "launch.fork_server"),
    *("_pytest_ranks.in_parent", "_pytest_ranks.item_in_rank"),
)
_PACKAGE = __name__.partition(".")[0]
# The modules of the stages, from top to bottom.
MODULES = (("torch",), ("unittest", "expecttest", "pytest", *(f"{_PACKAGE}.{name}" for name in _OURS)))
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
        self.fault, self._retry_at = "", 0.0  # of a stage below

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
        gc.freeze()  # the collections of programs do not write to shared pages
        why = before.fault(written)
        system.collapse_all()
        return why

    def _import(self, module: str, environ: dict[str, str]) -> StashedLayer:
        before, filters = dict(os.environ), [*warnings.filters]
        RecordingEnviron.begin()
        with contextlib.suppress(Exception):  # a program that needs it will report the error
            importlib.import_module(module)
        # What an earlier import has set depends on what that one has read.
        seen = {name: before.get(name) for name in RecordingEnviron.end() if before.get(name) == environ.get(name)}
        puts = {name: value for name, value in os.environ.items() if before.get(name) != value}
        layer = StashedLayer(self._stash.new_names(), module, seen, puts)
        if module == "torch":
            layer.native = native(environ)
        layer.filters = [one for one in warnings.filters if one not in filters]
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
                message, fds = handover.receive(control)
            except (EOFError, OSError):
                os._exit(0)
            answer = self.answer(message, fds)
            with contextlib.suppress(OSError):
                handover.send(control, answer)
            if "stale" in answer:
                os._exit(0)
            for fd in fds:
                os.close(fd)

    def answer(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Have the program run: by a stage below, or by this one. Says "taken", "stale", "other" or "cold" and why.

        The first of `fds` is the client.
        """
        environ = message["seen_by_imports"]
        if self.record.changed() is not None:
            return {"stale": True}
        if any(layer.changed(environ) for layer in self._layers):
            return {"other": True}
        if self.depth < len(MODULES):
            for child in [*self.children]:
                if "taken" in self._ask(child, message, fds):
                    return {"taken": True}
            below = self._fork_stage(environ)
            if below is not None and "taken" in self._ask(below, message, fds):
                return {"taken": True}
        if self.depth == 0:
            return {"cold": self.fault}
        if os.fork() == 0:
            self._become_program(message, fds)
        return {"taken": True}

    def _ask(self, child: socket.socket, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        try:
            handover.send(child, message, fds)
            answer, _ = handover.receive(child)
        except (EOFError, OSError):
            answer = {"stale": True}
        if "stale" in answer:
            self.children.remove(child)
            child.close()
        return answer

    def _fork_stage(self, environ: dict[str, str]) -> socket.socket | None:
        """A stage below, with its modules imported; None if it is unfit."""
        if time.monotonic() < self._retry_at:
            return None
        while len(self.children) >= _MOST_CHILDREN:
            self.children.pop(0).close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, handover.KIND)
        above = os.getpid()
        if os.fork() == 0:
            try:
                system.die_with(above, signal.SIGKILL)  # also while it imports
                self._become_stage(theirs.fileno(), environ)
            except Exception:
                os._exit(1)  # the stage above is gone, or does not want this one any more
        theirs.close()
        ours.settimeout(_BUILD_TIMEOUT)
        try:
            answer, _ = handover.receive(ours)
        except (EOFError, OSError):
            answer = {"fault": "the process that imports torch ended early, or took too long", "young": None}
        self.fault = answer["fault"] or ""
        if self.fault or answer["young"]:
            self._retry_at = math.inf if self.fault else time.monotonic() + _SETTLING
            ours.close()
            return None
        self.children.append(ours)
        return ours

    def _become_stage(self, control: int, environ: dict[str, str]) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._close_others([control])
        if self.depth == 0:  # the modules of the server stay its own
            for name in [name for name in sys.modules if name.partition(".")[0] == _PACKAGE]:
                del sys.modules[name]
            self._stash.add(StashedLayer(self._stash.new_names()))
            sys.path[:] = self._fresh.path
        sock = socket.socket(fileno=control)
        stage = Stage(self.depth + 1, self._notes, self._fresh, self._stash)
        fault, young = stage.build(environ), stage.record.unsettled()
        handover.send(sock, {"fault": fault, "young": young})
        if fault or young:
            os._exit(0)
        stage.serve(sock)

    def _become_program(self, message: dict[str, Any], fds: list[int]) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._notes = fcntl.fcntl(self._notes, fcntl.F_DUPFD_CLOEXEC, warm_program.FAR + len(fds))
        self._close_others(fds)
        request = ProgramRequest(message, fds[1:])
        try:
            keep(socket.socket(fileno=fds[0]), request.close, message["leads"], message["adopts"])
            run = warm_program.become(request, self._fresh, self._stash, self._tell)
        except BaseException:
            os._exit(1)
        raise ProgramBegins(run)

    def _close_others(self, kept: list[int]) -> None:
        for one in gc.get_objects():
            if type(one) is socket.socket:
                one.detach()  # it must not close a descriptor of a program when it is collected
        if self._control is not None:  # exempt from collection
            self._control.detach()
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in (0, 1, 2, self._notes, *kept):
                with contextlib.suppress(OSError):  # it was the listing's own
                    os.close(int(name))
        self.children = []

    def _tell(self, note: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            os.write(self._notes, json.dumps(note).encode())


def reap_children() -> None:
    """Have children that end leave nothing behind."""
    signal.signal(signal.SIGCHLD, lambda number, frame: [None for _ in reaping.reap()] and None)


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
        pid = os.fork()  # libraries that can do without their threads end them before a fork
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        return "an import of torch or of this package starts threads" if system.threads() > 1 else None
