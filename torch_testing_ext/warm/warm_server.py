"""The server: stages that have imported modules, and the parent of each program."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import math
import os
import select
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial

from torch_testing_ext._process import ends, system
from torch_testing_ext._process.private_folders import socket_name

from . import server_link, warm_program
from .read_record import ReadRecord
from .server_link import (
    AskStatus,
    BeginProgram,
    ForkProgram,
    Message,
    OtherVariables,
    ProgramBegun,
    ProgramEnded,
    ProgramReady,
    ProgramStopped,
    RunCold,
    RunProgram,
    SendSignal,
    ServerStatus,
    ServerStopped,
    StageAnswer,
    StageBuilt,
    Stale,
    StartedAgain,
    StopServer,
    Taken,
)
from .warm_program import (
    FreshInterpreter,
    ProgramRequest,
    RecordingEnviron,
    Stash,
    StashedLayer,
    variables_of_native_code,
)

# --------------------------------------------------------------------------------------------------------------------
# The supervisor of one program: its parent, which tells the client how it goes on and passes the client's signals to
# it.
#
# It is a fork of the stage whose modules the program gets, and needs neither that stage nor the server any more.
#
# Neither it nor a stage is a `ForkHost`. It also reports that its program has stopped, and a program can be stopped
# only if its parent is in the same session. A stage reports no ends, and the programs that it has forked outlive it.
# And a program leaves the code that has forked it by an exception, in the state of a new interpreter: there may be no
# loop with handlers of signals and descriptors of its own.

_WOKEN_BY = (signal.SIGCHLD, signal.SIGIO)


def keep_program(client: socket.socket, close_its: Callable[[], object], leads: bool, adopts: bool) -> None:
    """Fork the program when the client asks for it, and keep it until it ends. Returns in the program alone.

    `close_its` closes, in the supervisor, the descriptors of the program. `leads`: the program leads its process group.
    `adopts`: what the program leaves running is killed.
    """
    # The server has set a time limit, which all processes of the connection share.
    client.setblocking(True)
    _tell(client, ProgramReady())
    if not _is_to_begin(client):
        os._exit(0)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    # Its parent is in the same session, so the group can be stopped.
    os.setpgid(0, 0)
    if adopts:
        system.adopt_orphans()
    for number in _WOKEN_BY:
        signal.signal(number, lambda number, frame: None)
    supervisor = os.getpid()
    pid = os.fork()
    if pid == 0:
        for number in _WOKEN_BY:
            signal.signal(number, signal.SIG_DFL)
        if leads:
            os.setpgid(0, 0)
        client.close()
        system.die_with(supervisor, signal.SIGKILL)
        return
    try:
        _tell(client, ProgramBegun())
        close_its()
        server_link.signal_news(client)
        _watch(client, pid, pid if leads else supervisor)
        if adopts:
            ends.end_children()
    finally:
        os._exit(0)


def _is_to_begin(client: socket.socket) -> bool:
    """Wait for the client's order. It may give up, and run the program by itself."""
    try:
        order, _ = server_link.receive(client)
    except (EOFError, OSError, ValueError):
        return False
    return isinstance(order, BeginProgram)


def _watch(client: socket.socket, pid: int, group: int) -> None:
    """Obey the client, and tell it of the program, until that ends."""
    while True:
        _obey(client, pid, group)
        ended, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
        if ended and os.WIFSTOPPED(status):
            _tell(client, ProgramStopped())
        elif ended:
            _tell(client, ProgramEnded(status))
            return
        signal.sigwait(_WOKEN_BY)


def _obey(client: socket.socket, pid: int, group: int) -> None:
    """Send the program the signals for which the client has asked by now. If the client is gone, kill it."""
    while True:
        try:
            order, _ = server_link.receive(client)
        except BlockingIOError:
            return
        except (EOFError, OSError, ValueError):
            _kill(pid, signal.SIGKILL)
            return
        if isinstance(order, SendSignal):
            _kill(-group if order.to_group else pid, order.number)


def _kill(target: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(target, number)


def _tell(client: socket.socket, news: Message) -> None:
    with contextlib.suppress(OSError):
        server_link.send(client, news)


# --------------------------------------------------------------------------------------------------------------------
# Stages: a tree of processes that have imported modules, and fork programs for clients.
#
# The first one, the server, has imported nothing; one below it torch; one below that this package. A stage checks
# before each program that no file it has read has changed, and that its imports would have read the same variables;
# if one has, it ends, and the stage above forks a new one. What an import does besides reading (threads, child
# processes, files that it writes or keeps open, output) makes a stage unfit: then the stage above forks the program.

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
            layer.native = variables_of_native_code(environ)
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
                request, fds = server_link.receive(control)
            except (EOFError, OSError):
                os._exit(0)
            assert isinstance(request, ForkProgram)
            answer = self.answer(request, fds)
            with contextlib.suppress(OSError):
                server_link.send(control, answer)
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
            server_link.send(child, request, fds)
            answer, _ = server_link.receive(child)
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
        ours, theirs = socket.socketpair(socket.AF_UNIX, server_link.KIND)
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
            built, _ = server_link.receive(ours)
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
        server_link.send(sock, StageBuilt(fault, young))
        if fault or young:
            os._exit(0)
        stage.serve(sock)

    def _become_program(self, program: RunProgram, fds: list[int]) -> None:
        """Fork the program from this process, which becomes its supervisor. In the program, raises ProgramBegins."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._notes = fcntl.fcntl(self._notes, fcntl.F_DUPFD_CLOEXEC, warm_program.FAR + len(fds))
        self._close_others(fds)
        client, *of_the_program = fds
        request = ProgramRequest(program, of_the_program)
        try:
            keep_program(socket.socket(fileno=client), request.close, program.leads, program.adopts)
            run = warm_program.become_program(request, self._fresh, self._stash, self._tell)
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
            os.write(self._notes, server_link.encode(note))


def reap_children() -> None:
    """Have children that end leave nothing behind."""

    def reap_all(number: int, frame: object) -> None:
        for _ in ends.reap():
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


# --------------------------------------------------------------------------------------------------------------------
# The server: the stage at the top, which listens for clients. It has imported nothing of any project, nor torch.

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
                question, fds = server_link.receive(client)
                answer = self._answer(question, [client.fileno(), *fds])
            if not isinstance(answer, Taken):
                with contextlib.suppress(OSError):
                    server_link.send(client, answer)
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
                note = server_link.decode(self._notes.recv(_LARGEST_NOTE))
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
    listener = socket.socket(socket.AF_UNIX, server_link.KIND)
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
        return partial(warm_program.run_program, begins.run)
    if is_there():
        with contextlib.suppress(OSError):
            os.unlink(place)
    os._exit(0)
