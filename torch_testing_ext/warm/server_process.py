"""The server: the stage at the top, which listens for clients. It has imported nothing of any project, nor torch."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import time
from collections.abc import Callable
from functools import partial

from torch_testing_ext._process import system
from torch_testing_ext._process.private_folders import socket_name

from . import handover, warm_program
from .handover import (
    AskStatus,
    ForkProgram,
    Message,
    RunCold,
    RunProgram,
    ServerStatus,
    ServerStopped,
    Stale,
    StartedAgain,
    StopServer,
    Taken,
)
from .read_record import ReadRecord
from .stage import ProgramBegins, Stage, reap_children
from .stashed_modules import Stash
from .warm_program import FreshInterpreter, ProgramRequest

_LOOK_INTERVAL = 2.0
_LARGEST_NOTE = 1 << 20


class WarmServer:
    """The process of the server."""

    def __init__(self, listener: socket.socket, fresh: FreshInterpreter, idle: float, is_there: Callable[[], bool]):
        """`is_there`: whether clients find the listener."""
        self._listener, self._idle, self._is_there = listener, idle, is_there
        self._notes, write_notes = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notes.setblocking(False)
        # By program: the variables that it sets before it imports torch.
        self._set_by: dict[str, dict[str, str | None]] = {}
        # By program that has modules of its own: the folders that say so.
        self._cold: dict[str, ReadRecord] = {}
        self._runs = 0
        self._stage = Stage(0, write_notes.detach(), fresh, Stash(fresh.modules, fresh.path))
        record = self._stage.record
        record.add_modules([*sys.modules])
        record.add_file(os.path.join(sys.prefix, "pyvenv.cfg"))
        for folder in fresh.path:
            record.add_folder(folder)
            for name in record.folders[folder][1]:
                if name.endswith((".pth", "customize.py")):
                    record.add_file(os.path.join(folder, name))

    def serve(self) -> None:
        """Serve clients until this is stale, idle or told to stop. In a program, ProgramBegins comes out of it."""
        if self._stage.record.unsettled() is not None:
            # It may differ from what was read: never fresh.
            self._stage.record.files["/"] = None
        reap_children()
        while self._wait():
            client, _ = self._listener.accept()
            client.settimeout(5.0)
            answer: Message = RunCold("the server cannot read the request")
            fds: list[int] = []
            # No `finally`: a program leaves this by ProgramBegins, and these descriptors are not its own.
            with contextlib.suppress(EOFError, OSError, ValueError, TypeError):
                question, fds = handover.receive(client)
                answer = self._answer(question, [client.fileno(), *fds])
            if not isinstance(answer, Taken):
                with contextlib.suppress(OSError):
                    handover.send(client, answer)
            for fd in fds:
                os.close(fd)
            client.close()
            if isinstance(answer, (Stale, ServerStopped)):
                return

    def _wait(self) -> bool:
        """Wait for a client. Returns False when idle, or when no client can come any more: the socket is gone."""
        until = time.monotonic() + self._idle
        while self._is_there():
            left = until - time.monotonic()
            if left <= 0:
                return False
            clients, _, _ = select.select([self._listener], [], [], min(left, _LOOK_INTERVAL))
            if clients:
                return True
        return False

    def _answer(self, question: Message, fds: list[int]) -> Message:
        """Answer a client, which is the first of `fds`. Raises ValueError if it asks nothing."""
        match question:
            case AskStatus():
                below = system.descendants(os.getpid())
                return ServerStatus(os.getpid(), self._runs, processes=len(below) + 1)
            case StopServer():
                return ServerStopped(os.getpid())
            case RunProgram():
                return self._have_run(question, fds)
            case _:
                raise ValueError(f"not a question: {question}")

    def _have_run(self, program: RunProgram, fds: list[int]) -> Message:
        """Have the stages run a program, unless it has modules of its own in place of theirs."""
        self._take_notes()
        _, *of_the_program = fds
        identity = ProgramRequest(program, of_the_program).identity
        cold = self._cold.get(identity)
        if cold is not None and cold.changed() is None:
            return RunCold("")
        environ = {**program.environ, **self._set_by.get(identity, {})}
        seen_by_imports = {name: value for name, value in environ.items() if value is not None}
        answer = self._stage.answer(ForkProgram(program, seen_by_imports), fds)
        if isinstance(answer, Taken):
            self._runs += 1
        return answer

    def _take_notes(self) -> None:
        """Learn from programs that had to start again."""
        with contextlib.suppress(BlockingIOError):
            while True:
                note = handover.decode(self._notes.recv(_LARGEST_NOTE))
                assert isinstance(note, StartedAgain)
                self._learn(note)

    def _learn(self, note: StartedAgain) -> None:
        """Start the program's next run with the variables that it sets; if that has not helped, run it cold."""
        known = self._set_by.setdefault(note.program, {})
        if any(known.get(name, "") != value for name, value in note.environ.items()):
            known.update(note.environ)
            return
        record = self._cold[note.program] = ReadRecord()
        for folder in note.folders:
            record.add_folder(folder)


def main(modules: list[str], path: list[str]) -> Callable[[], object]:
    """Serve, as `python -c CODE SOCKET IDLE READY`. Returns a program in a process that is to run one."""
    place = sys.argv[1]
    idle = float(sys.argv[2])
    ready = int(sys.argv[3])
    fresh = FreshInterpreter(modules, path)
    os.chdir("/")
    listener = socket.socket(socket.AF_UNIX, handover.KIND)
    draft = f"{place}.{os.getpid()}"
    with socket_name(draft) as name:
        listener.bind(name)
    listener.listen(64)
    # The socket that a killed server has left goes.
    os.rename(draft, place)
    number = os.stat(place).st_ino

    def is_there() -> bool:
        try:
            return os.stat(place).st_ino == number
        except OSError:
            return False

    try:
        server = WarmServer(listener, fresh, idle, is_there)
        os.close(ready)
        server.serve()
    except ProgramBegins as begins:
        return partial(warm_program.run, begins.run)
    if is_there():
        with contextlib.suppress(OSError):
            os.unlink(place)
    os._exit(0)
