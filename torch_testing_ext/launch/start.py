"""Starts ranks: the one fork server of this process, the connection to it, and its runs."""

from __future__ import annotations

import atexit
import itertools
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from torch_testing_ext._machine import machine_resources
from torch_testing_ext._process import (
    ends,
    fork_safety,
    interpreters,
    notes,
    sessions,
    system,
    temporary_folders,
    words,
)
from torch_testing_ext._process.channels import Channel, socket_pair
from torch_testing_ext._process.event_loop import EventLoop, wait_readable
from torch_testing_ext._process.messages import unexpected
from torch_testing_ext._process.notes import warn_user

from . import environment, fork_server as fork_server
from .fork_server import Launch, Preload, StartMethod
from .in_rank import Job, Named
from .own_report import Cause, now
from .verdict import Exit, Outcome

# --------------------------------------------------------------------------------------------------------------------
# A fork server as the process sees it that needs ranks, and its runs.

# A server answers in milliseconds unless it is importing a module. A server that is stuck must not block this process.
ANSWER_TIMEOUT = 30.0
_QUIT_TIMEOUT = 5.0
# A new interpreter imports torch and the test module before it answers.
_HELLO_TIMEOUT = 120.0


# Keeps these frames out of tracebacks: messages are complete.
__unittest = True
__tracebackhide__ = True


class CannotStart(RuntimeError):
    """Ranks could not be started; the message gives the reason and the remedy."""

    outcome = Outcome.ERROR
    cause_of_failure = Cause.OWN

    def __init__(self, message: str, *, is_refused: bool = False):
        """`is_refused`: by the system, as for a limit or a full disk: no other way to start ranks would help."""
        super().__init__(message)
        self.is_refused = is_refused


class ServerUnfit(Exception):
    """This server is gone, or does not have the class that is to be run; a new server would do."""


class ForkServerClient:
    """A fork server as this process sees it."""

    def __init__(self, method: fork_server.StartMethod, subject: Named, directory: Path, inherited: Any = None):
        """`inherited` is for the contexts of ranks that are forked off this process."""
        self.method = method
        # The reason why it must not be used for another run.
        self.unusable: str | None = None
        self.runs: dict[int, Run] = {}
        self.loop = EventLoop()
        # Then it is unsafe to fork.
        self.accelerator_in_use = False
        self._hello: fork_server.Hello | None = None
        self._reaped = False
        ours, theirs = socket_pair()
        self._channel: Channel[fork_server.FromServer] = Channel(ours, fork_server.FromServer)
        self._popen: subprocess.Popen[bytes] | None = None
        about = fork_server.Serve(directory, method, os.getpid(), tuple(sys.argv), subject)
        try:
            with theirs:
                if method is fork_server.StartMethod.FORK:
                    self.pid = self._fork(theirs, about, inherited)
                else:
                    self.pid = self._spawn(theirs, about)
        except OSError:
            self._channel.close()
            self.loop.close()
            raise
        self.loop.listen(self._channel, self._receive)

    def _fork(self, theirs: socket.socket, about: fork_server.Serve, inherited: Any) -> int:
        def serve() -> NoReturn:
            self._channel.close()
            machine_resources.forget_leases()
            serves_to_the_end = inherited is None
            if serves_to_the_end:
                sessions.leave_connections(theirs.fileno())
            fork_server.begin(Channel(theirs, fork_server.ToServer), about, inherited)

        # Not SIGKILL: there may be ranks to end first.
        return sessions.fork_child(serve, killed_by=signal.SIGTERM)

    def _spawn(self, theirs: socket.socket, about: fork_server.Serve) -> int:
        command = interpreters.command("launch.fork_server", sys.path, str(theirs.fileno()))
        self._popen = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self.send(about)
        return self._popen.pid

    def wait_until_ready(self) -> str | None:
        """Wait until it is ready. Returns the reason if it cannot serve, or None."""
        until = now() + _HELLO_TIMEOUT
        while self._hello is None and self.unusable is None:
            if not self.loop.step(until):
                return f"it was not ready after {_HELLO_TIMEOUT:.0f} s"
        if self._hello is None:
            return "it ended while it was getting ready (its error is printed above)"
        if self._hello.unsafe or self.method is not fork_server.StartMethod.FORK:
            return self._hello.unsafe
        return fork_safety.check_after_fork()

    def send(self, message: fork_server.ToServer) -> None:
        self._channel.send(message)

    def _receive(self) -> None:
        try:
            for message in self._channel.receive():
                self._on_message(message)
        except (EOFError, OSError):
            self._lose()
        except (ServerUnfit, CannotStart):
            raise
        except BaseException:
            # Interrupted: messages may be lost.
            self.give_up()
            raise

    def _on_message(self, message: fork_server.FromServer) -> None:
        match message:
            case fork_server.Hello():
                self._hello = message
                self.accelerator_in_use = message.in_use
            # Messages about a run that has been finished are ignored.
            case fork_server.Started(run, pids):
                if run in self.runs:
                    self.runs[run].pids = pids
            case fork_server.Restarted(run, rank, pid):
                if run in self.runs:
                    self.runs[run].on_restarted(rank, pid)
            case fork_server.Exited(run, rank, exit):
                notes.note_left_running(f"rank {rank}: {process}" for process in exit.leftovers)
                if run in self.runs:
                    self.runs[run].exits[rank] = exit
            case fork_server.Dumped(run):
                if run in self.runs:
                    self.runs[run].dumped = True
            case fork_server.StartFailed(_, why, needs_new_server):
                if needs_new_server:
                    raise ServerUnfit(why)
                raise CannotStart(f"ranks could not be started: {why}", is_refused=True)
            case _:
                unexpected(message)

    def give_up(self) -> None:
        """Kill a server that does not answer. Its ranks die with it."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._lose(f"did not answer for {ANSWER_TIMEOUT:.0f} s")

    def _lose(self, why: str = "") -> None:
        """Handle the loss of the server. The kernel kills its ranks, and this process kills their groups."""
        self.loop.forget(self._channel)
        how = "ended" if self._reaped else self._reap()
        self.unusable = f"the process that starts the ranks (pid {self.pid}) {why or how}"
        for run in self.runs.values():
            for rank in run.alive:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(run.pids[rank], signal.SIGKILL)
            run.lost = self.unusable

    def _reap(self) -> str:
        """Wait until it has ended. Returns how it ended."""
        code = ends.wait_for_exit(self.pid) if self._popen is None else self._popen.wait()
        self._reaped = code is not None
        return "ended" if code is None else ends.describe_exit(code)

    def close(self) -> None:
        """End the server and everything that it started. It would also end when the connection closes."""
        if not self._reaped:
            self.send(fork_server.Quit())
            self._wait_until_disconnected()
            self._reap()
        self._channel.close()
        self.loop.close()

    def _wait_until_disconnected(self) -> None:
        """Wait until the server closes its end. One that is stuck in an import is killed; its ranks die with it."""
        self.loop.forget(self._channel)
        until = now() + _QUIT_TIMEOUT
        with suppress(EOFError, OSError):
            while wait_readable(self._channel, until):
                self._channel.receive()
            os.kill(self.pid, signal.SIGKILL)


@dataclass
class Run:
    """One job while it runs, with everything that has been reported about it so far."""

    number: int
    job: Job
    server: ForkServerClient
    began: float = field(default_factory=now)
    pids: tuple[int, ...] = ()
    exits: dict[int, Exit] = field(default_factory=dict)
    dumped: bool = False
    # The reason why the server is gone; None while it is there.
    lost: str | None = None
    # The server ends with this run.
    owns_server: bool = False
    # Ranks that are being started again.
    restarting: set[int] = field(default_factory=set)

    @property
    def alive(self) -> list[int]:
        """The ranks that are still running."""
        if self.lost:
            return []
        return [rank for rank in range(len(self.pids)) if rank not in self.exits]

    def wait_for_event(self, until: float | None = None) -> bool:
        """Wait for the next event and handle it. Returns False if the time `until` came first."""
        return self.server.loop.step(until)

    def restart(self, rank: int) -> None:
        """Start a rank again that has ended, as another process."""
        job = replace(self.job, incarnation=1)
        self.restarting.add(rank)
        self.server.send(fork_server.Restart(self.number, rank, pickle.dumps(job)))
        self.wait_until(lambda: rank not in self.restarting)

    def on_restarted(self, rank: int, pid: int) -> None:
        del self.exits[rank]
        self.pids = (*self.pids[:rank], pid, *self.pids[rank + 1 :])
        self.restarting.discard(rank)

    def signal(self, number: int, rank: int | None = None) -> None:
        """Signal all ranks that are still running, with all processes in their groups; or one rank alone."""
        self.server.send(fork_server.Signal(self.number, number, rank))

    def dump(self, timeout: float, ranks: Iterable[int] | None = None) -> None:
        """Have these ranks, or all that are still running, write their stacks and flight recorders."""
        self.dumped = False
        asked = tuple(self.alive if ranks is None else ranks)
        self.server.send(fork_server.Dump(self.number, asked, timeout))
        self.wait_until(lambda: self.dumped, timeout)

    def probe(self, ranks: Iterable[int]) -> None:
        """Ask these ranks, which are still running, for their collectives. They write these when they get to it."""
        self.server.send(fork_server.Probe(self.number, tuple(ranks)))

    def wait_until(self, done: Callable[[], bool], timeout: float = 0.0) -> None:
        """Wait until `done`, which a working server achieves at once; give up a server that is stuck."""
        until = now() + timeout + ANSWER_TIMEOUT
        while not done() and not self.lost:
            if not self.wait_for_event(until):
                self.server.give_up()


# --------------------------------------------------------------------------------------------------------------------
# The parent's side: one fork server for this process, made when first needed, and its runs.
#
# Ranks may also inherit what this process has set up by now (`launch_from_here`), or nothing of it (`launch_fresh`).
#
# The fork server is forked from this process if that is safe (nothing is imported twice); else it is a new
# interpreter that imports the test module; else each rank is a new interpreter. TORCH_TESTING_EXT_START overrides the
# choice.


class Launcher:
    """Starts the ranks of this process: it owns the fork server, and the directory that holds the files of its runs."""

    def __init__(self, directory: Path | None = None, hints: Iterable[str] = (), inherits: bool = True):
        """`directory` belongs to this process alone and is removed when it ends; None makes one when needed.

        `hints`: modules to preload. Unless it `inherits`, the ranks have nothing of this process: their fork server is
        a new interpreter.
        """
        self.owner = os.getpid()
        self.server: ForkServerClient | None = None
        # Modules that ranks had to import themselves. A runner preloads them in the process that forks this one.
        self.preload_hints = dict.fromkeys(hints)
        self._directory = directory
        self._kept = ExitStack()
        self._inherits = inherits
        self._closes_at_exit = False
        # The setting under which the server was made.
        self._wanted = ""
        self._warned: set[tuple[str, str]] = set()
        # This process could not be forked as it uses an accelerator.
        self._in_use = False
        self._numbers = itertools.count()

    def session_directory(self) -> Path:
        """The directory of this process's runs. Removed at exit, or by another process of ours if we are killed."""
        if self._directory is None:
            with _refusals("the folder for the files of ranks cannot be made"):
                self._directory = self._make_directory()
            if not self._closes_at_exit:
                self._closes_at_exit = True
                atexit.register(self._close_at_exit)
        with _refusals("the folder for the files of ranks cannot be made"):
            self._directory.mkdir(parents=True, exist_ok=True)
        return self._directory

    def _make_directory(self) -> Path:
        prefix = "torch_testing_ext_"
        if environment.this_launch() is None:
            # The fork server removes it.
            return Path(tempfile.mkdtemp(prefix=prefix))
        # A rank of a launcher has no fork server. It is killed when another rank fails, or ends without exit handlers.
        return self._kept.enter_context(temporary_folders.temporary_folder(prefix))

    def _close_at_exit(self) -> None:
        if self.owner == os.getpid():
            self.close()

    def close(self) -> None:
        """End the server and remove the session's files. The next launch makes new ones."""
        self._discard_server()
        self._kept.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def launch(self, job: Job) -> Run:
        """Start the ranks of a job. Raises CannotStart."""
        job = environment.complete_job(job)
        wanted = environment.wanted_start(job)
        try:
            return self.launch_on(self._get_server(job.names[-1], wanted), job)
        except ServerUnfit:
            self._discard_server()
        # Ranks of the failed attempt may have left files there, a rendezvous store for one.
        _empty(job.directory)
        try:
            return self.launch_on(self._get_server(job.names[-1], wanted), job)
        except ServerUnfit as why:
            raise CannotStart(f"two attempts to start the ranks failed: {why}") from None

    def launch_on(self, server: ForkServerClient, job: Job) -> Run:
        job = replace(job, inherits=server.method is StartMethod.FORK)
        run = Run(next(self._numbers), job, server)
        server.runs[run.number] = run
        try:
            server.send(Launch(run.number, pickle.dumps(run.job)))
            run.wait_until(lambda: bool(run.pids))
            if run.lost:
                raise ServerUnfit(run.lost)
        except BaseException:
            run.signal(signal.SIGKILL)
            finish(run)
            raise
        return run

    # -- the server

    def prepare(self, subject: Named, imports: tuple[str, ...]) -> None:
        """Fork the server now if it would be forked at the first launch, and have it import these modules."""
        if self.server is not None:
            return
        self.preload_hints.update(dict.fromkeys(imports))
        wanted = environment.read_settings().start
        if _best_methods(wanted)[0] is StartMethod.FORK:
            self.server, _ = self.try_method(StartMethod.FORK, subject)
            self._wanted = wanted
            if self.server is not None and imports:
                self.server.send(Preload(imports, at_once=True))

    def _get_server(self, subject: Named, wanted: str) -> ForkServerClient:
        if self.server is not None and (self.server.unusable or not self._suits(self.server, wanted)):
            self._discard_server()
        if self.server is None:
            self.server = self._make_server(wanted, subject)
            self._wanted = wanted
        return self.server

    def _suits(self, server: ForkServerClient, wanted: str) -> bool:
        """Would this setting choose such a server? After another setting, a better method may be possible again."""
        first, *others = _METHODS_OF[wanted]
        return server.method is first or (wanted == self._wanted and server.method in others)

    def _discard_server(self) -> None:
        if self.server is not None:
            self.server.close()
            self.server = None

    def _make_server(self, wanted: str, subject: Named) -> ForkServerClient:
        reasons: list[str] = []
        for method in _best_methods(wanted):
            if method is not StartMethod.FORK and "<locals>" in subject.qualname:
                # No other interpreter has this class.
                continue
            if method is StartMethod.SPAWN and reasons:
                self._warn_once("ranks are started as new interpreters, which takes seconds", "; ".join(reasons))
            server, unusable = self.try_method(method, subject)
            if server is not None:
                if method is StartMethod.FORK_FRESH and self._in_use and reasons:
                    slow = "ranks are forked from a new interpreter, which takes seconds to start"
                    self._warn_once(slow, reasons[0])
                return server
            reasons.append(f"{_SUBJECT_OF[method]}: {unusable}")
        return _explain_failure(wanted, subject, reasons)

    def try_method(
        self, method: StartMethod, subject: Named, inherited: Any = None
    ) -> tuple[ForkServerClient | None, str]:
        """Make a server by this method. Returns it, or the reason why there is none."""
        why_not = self._why_not_forked() if method is StartMethod.FORK else None
        if why_not is not None:
            return None, why_not
        with _refusals("the process that starts ranks could not be started"):
            server = ForkServerClient(method, subject, self.session_directory(), inherited)
        try:
            unsafe = server.wait_until_ready()
        except BaseException:
            # For one, Ctrl-C.
            server.close()
            raise
        if unsafe is None:
            return server, ""
        server.close()
        if method is StartMethod.FORK:
            self._in_use = server.accelerator_in_use
        return None, unsafe

    def _why_not_forked(self) -> str | None:
        if not self._inherits:
            return "its ranks must not inherit from it"
        return fork_safety.was_forked() or fork_safety.prepare_to_fork()

    def _warn_once(self, text: str, reason: str) -> None:
        if (text, reason) not in self._warned:
            self._warned.add((text, reason))
            warn_user(text, reason)

    # -- preload hints

    def add_preload_hints(self, run: Run, modules: tuple[str, ...]) -> None:
        """Have modules that the ranks of this run had to import themselves preloaded for the next ranks."""
        self.preload_hints.update(dict.fromkeys(modules))
        if modules and not run.owns_server:
            run.server.send(Preload(modules))


# Of each setting: the start methods to try, in order.
_METHODS_OF = {
    "auto": (StartMethod.FORK, StartMethod.FORK_FRESH, StartMethod.SPAWN),
    "fork": (StartMethod.FORK, StartMethod.FORK_FRESH),
    "fork-fresh": (StartMethod.FORK_FRESH,),
    "spawn": (StartMethod.SPAWN,),
}

_SUBJECT_OF = {
    StartMethod.FORK: "this process cannot be forked",
    StartMethod.FORK_FRESH: "neither can a new interpreter",
    StartMethod.SPAWN: "an interpreter that starts ranks failed",
}


def _best_methods(wanted: str) -> tuple[StartMethod, ...]:
    """The start methods to try here, in order: a process that has made groups is forked only if no other can be."""
    methods = _METHODS_OF[wanted]
    if StartMethod.FORK not in methods or "torch" not in sys.modules:
        return methods
    from torch_testing_ext._torch.groups import process_groups

    if not process_groups.made_groups_before():
        return methods
    return (StartMethod.FORK_FRESH, StartMethod.FORK, *methods[2:])


def _explain_failure(wanted: str, subject: Named, reasons: list[str]) -> NoReturn:
    if "<locals>" in subject.qualname:
        why = "; ".join(reasons) or f"TORCH_TESTING_EXT_START={wanted}, or --sanitize=hash"
        raise CannotStart(
            f"{subject.qualname} is defined inside a function, so its ranks must be forked from this process: {why}"
        )
    if wanted.startswith("fork"):
        raise CannotStart(f"TORCH_TESTING_EXT_START={wanted}, but ranks cannot be forked: {'; '.join(reasons)}")
    raise CannotStart("; ".join(["the process that starts ranks could not be started", *reasons]))


def _empty(directory: Path) -> None:
    for entry in directory.iterdir():
        with suppress(OSError):
            entry.unlink()


# -- the launchers of this process

# Those of each thread: a server ends with the thread that has made it, and its loop serves no other.
_own = threading.local()


def launcher(inherits: bool = True) -> Launcher:
    """Return the launcher of this thread for ranks that inherit from it, or for those that do not.

    A child that a test forked has a copy of its parent's launcher, but not the processes: it gets its own launcher.
    """
    launchers: dict[bool, Launcher] = _own.__dict__.setdefault("launchers", {})
    known = launchers.get(inherits)
    if known is not None and known.owner == os.getpid():
        return known
    hints = () if known is None else known.preload_hints
    launchers[inherits] = Launcher(hints=hints, inherits=inherits)
    return launchers[inherits]


def work_in(directory: Path) -> None:
    """Keep the files of this process's runs in `directory`, which holds nothing else and is removed with them."""
    _own.launchers = {True: Launcher(directory, launcher().preload_hints)}


def launch(job: Job) -> Run:
    return launcher().launch(job)


def launch_fresh(job: Job) -> Run:
    """Start the ranks of a job in the state of a new interpreter, which imports torch once. Raises CannotStart."""
    return launcher(inherits=False).launch(job)


def launch_from_here(job: Job, inherited: Any = None) -> Run:
    """Start the ranks of a job, forked from this process as it is now. Their fork server ends with them.

    `inherited` is an object of this process that they get in their contexts.

    Raises CannotStart if it is not safe to fork, or if the setting wants another start method.
    """
    job = environment.complete_job(job)
    wanted = environment.wanted_start(job)
    own = launcher()
    server = None
    if StartMethod.FORK in _METHODS_OF[wanted]:
        server, unusable = own.try_method(StartMethod.FORK, job.names[-1], inherited)
        why_not = f"but that is not safe: {unusable}"
    elif job.differs_in_hash:
        why_not = "but --sanitize=hash needs new interpreters"
    else:
        why_not = f"but TORCH_TESTING_EXT_START={wanted}"
    if server is None:
        raise CannotStart(f"these ranks inherit the state of this process, so they must be forked, {why_not}")
    try:
        run = own.launch_on(server, job)
        run.owns_server = True
        return run
    except ServerUnfit as why:
        server.close()
        raise CannotStart(f"the ranks could not be started: {why}") from None
    except BaseException:
        server.close()
        raise


def prepare(subject: Named, imports: tuple[str, ...] = ()) -> None:
    """Fork the fork server now, if that is possible: the ranks of such a job have the state of the process as it is.

    Does nothing where there is one, or where ranks have to be started in another way. A server only knows things that
    were named before it was forked. `imports`: modules that the ranks will need. Raises CannotStart.
    """
    launcher().prepare(subject, imports)


def close() -> None:
    """End the fork server and its ranks, and remove their files. The next launch makes new ones."""
    launcher().close()


def preload_hints() -> tuple[str, ...]:
    """Return the modules of torch that earlier ranks of this process had to import by themselves."""
    return tuple(launcher().preload_hints)


def finish(run: Run) -> None:
    """Forget a run that is over, and end a server that has started no other."""
    run.server.runs.pop(run.number, None)
    if run.owns_server:
        run.server.close()


# How many directories of a name this process has made.
_directories: dict[Path, int] = {}


def new_directory(name: str) -> Path:
    """A directory for one run's files: kept below TORCH_TESTING_EXT_LOGS if that is set.

    No name is used twice: an object of an earlier test that still exists, such as a store, may remove its file late.
    """
    parent = environment.read_settings().logs or launcher().session_directory()
    safe = words.file_name(name)[-150:]
    with _refusals("the folder for the files of ranks cannot be made"):
        parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(_directories.get(parent / safe, 0)):
            directory = parent / (safe if number == 0 else f"{safe}.{number}")
            with suppress(FileExistsError):
                directory.mkdir()
                _directories[parent / safe] = number + 1
                return directory
    raise AssertionError


@contextmanager
def _refusals(what: str) -> Iterator[None]:
    """Raise CannotStart with what to do where the system refuses something."""
    try:
        yield
    except OSError as error:
        raise CannotStart(f"{what}: {system.why_refused(error)}", is_refused=True) from None


def discard(directory: Path, of_fault: bool = False) -> None:
    """Remove the directory of a run, unless the user keeps the files. `of_fault`: a drill has hundreds of these."""
    settings = environment.read_settings()
    if settings.logs is None or (of_fault and settings.drill is not None):
        shutil.rmtree(directory, ignore_errors=True)
