"""The parent's side: one fork server for this process, made when first needed, and its runs.

The fork server is forked from this process if that is safe (nothing is imported twice); else it is a new interpreter
that imports the test module; else each rank is a new interpreter. TORCH_TESTING_EXT_START overrides the choice.
"""

from __future__ import annotations

import atexit
import itertools
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from torch_testing_ext._process import child, fork_safety, interpreter, reaping
from torch_testing_ext._process.channel import Channel, socket_pair
from torch_testing_ext._process.exits import describe_exit
from torch_testing_ext._process.loop import EventLoop
from torch_testing_ext._process.messages import unexpected

from . import fork_server, settings
from .job import Job, Named
from .protocol import (
    Dump,
    Dumped,
    Exited,
    Failed,
    FromServer,
    Hello,
    Launch,
    Look,
    Preload,
    Quit,
    Serve,
    SignalGroups,
    SignalRank,
    Started,
    StartMethod,
    ToServer,
    Unable,
)
from .report import Exit, now

_QUIT_PATIENCE = 5.0
_HELLO_PATIENCE = 120.0  # a new interpreter imports torch and the test module before it answers
# A server answers in milliseconds unless it is importing a module. A server that is stuck must not block this process.
_ANSWER_PATIENCE = 30.0


class CannotStart(RuntimeError):
    """Ranks could not be started; the message gives the reason and the remedy."""


class TryAnother(Exception):
    """This server is gone, or does not have the class that is to be run; a new server would do."""


@dataclass
class Run:
    """One job while it runs, with everything that the server has reported about it so far."""

    number: int
    job: Job
    server: ForkServerClient
    began: float = field(default_factory=now)
    pids: tuple[int, ...] = ()
    exits: dict[int, Exit] = field(default_factory=dict)
    dumped: bool = False
    lost: str | None = None  # why the server is gone; None while it is there

    @property
    def alive(self) -> list[int]:
        """The ranks that are still running."""
        return [] if self.lost else [rank for rank in range(len(self.pids)) if rank not in self.exits]

    def wait_for_event(self, until: float | None = None) -> bool:
        """Wait for the next event and handle it. Returns False if the time `until` came first."""
        return self.server.step(until)

    def end(self, number: int) -> None:
        """Signal all ranks that are still running, with all processes in their groups."""
        self.server.send(SignalGroups(self.number, number))

    def signal(self, number: int, rank: int) -> None:
        """Signal one rank and no other process."""
        self.server.send(SignalRank(self.number, rank, number))

    def dump(self, patience: float, ranks: Iterable[int] | None = None) -> None:
        """Have these ranks, or all that are still running, write their stacks and flight recorders."""
        self.dumped = False
        self.server.send(Dump(self.number, tuple(self.alive if ranks is None else ranks), patience))
        self.wait_until(lambda: self.dumped, patience)

    def look(self) -> None:
        """Ask the ranks that are still running for their collectives. They write these when they get to it."""
        self.server.send(Look(self.number))

    def wait_until(self, done: Callable[[], bool], patience: float = 0.0) -> None:
        """Wait until `done`, which a working server achieves at once; give up a server that is stuck."""
        until = now() + patience + _ANSWER_PATIENCE
        while not done() and not self.lost:
            if not self.wait_for_event(until):
                self.server.give_up()


class ForkServerClient:
    """A fork server as this process sees it."""

    def __init__(self, method: StartMethod, subject: Named, directory: Path):
        self.method = method
        self.unusable: str | None = None  # why it must not be used for another run
        self.runs: dict[int, Run] = {}
        self.loop = EventLoop()
        self._hello: Hello | None = None
        self._reaped = False
        ours, theirs = socket_pair()
        self._channel: Channel[FromServer] = Channel(ours, FromServer)
        self._popen: subprocess.Popen[bytes] | None = None
        with theirs:
            if method is StartMethod.FORK:
                self.pid = self._fork(Channel(theirs, ToServer), directory)
            else:
                self.pid = self._spawn(theirs.fileno(), directory, subject)
        self.loop.listen(self._channel, self._receive)

    def _fork(self, theirs: Channel[ToServer], directory: Path) -> int:
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            with suppress(Exception):
                stream.flush()  # type: ignore[union-attr] # or both processes would write the buffered text
        parent = os.getpid()

        def serve() -> NoReturn:
            self._channel.close()
            fork_server.begin(theirs, directory, StartMethod.FORK, parent)

        return child.fork_child(serve, killed_by=signal.SIGTERM)  # not SIGKILL: there may be ranks to end first

    def _spawn(self, theirs: int, directory: Path, subject: Named) -> int:
        command = interpreter.command("launch.fork_server", sys.path, str(theirs))
        self._popen = subprocess.Popen(command, pass_fds=[theirs])
        self.send(Serve(directory, self.method, os.getpid(), tuple(sys.argv), subject))
        return self._popen.pid

    def wait_until_ready(self) -> str | None:
        """Wait until it is ready. Returns the reason if it cannot serve, or None."""
        until = now() + _HELLO_PATIENCE
        while self._hello is None and self.unusable is None:
            if not self.step(until):
                return f"it was not ready after {_HELLO_PATIENCE:.0f} s"
        if self._hello is None:
            return "it ended while it was getting ready (its error is printed above)"
        return self._hello.unsafe or (fork_safety.check_after_fork() if self.method is StartMethod.FORK else None)

    @property
    def accelerator_in_use(self) -> bool:
        """Is it unsafe to fork because an accelerator is in use?"""
        return self._hello is not None and self._hello.in_use

    def send(self, message: ToServer) -> None:
        self._channel.send(message)

    def step(self, until: float | None) -> bool:
        """Wait for the next event and handle it. Returns False if the time `until` came first."""
        return self.loop.step(until)

    def _receive(self) -> None:
        try:
            for message in self._channel.receive():
                self._on_message(message)
        except (EOFError, OSError):
            self._lose()
        except (TryAnother, CannotStart):
            raise
        except BaseException:
            self.give_up()  # interrupted: messages may be lost
            raise

    def _on_message(self, message: FromServer) -> None:
        match message:
            case Hello():
                self._hello = message
            # Messages about a run that has been finished are ignored.
            case Started(run, pids):
                if run in self.runs:
                    self.runs[run].pids = pids
            case Exited(run, rank, exit):
                if run in self.runs:
                    self.runs[run].exits[rank] = exit
            case Dumped(run):
                if run in self.runs:
                    self.runs[run].dumped = True
            case Unable(_, why):
                raise TryAnother(why)
            case Failed(_, why):
                raise CannotStart(f"ranks could not be started: {why}")
            case _:
                unexpected(message)

    def give_up(self) -> None:
        """Kill a server that does not answer. Its ranks die with it."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._lose(f"did not answer for {_ANSWER_PATIENCE:.0f} s")

    def _lose(self, why: str = "") -> None:
        """Handle the loss of the server. The kernel kills its ranks, and this process kills their groups."""
        self.loop.forget(self._channel)
        how = self._reap() if not self._reaped else "ended"
        self.unusable = f"the process that starts the ranks (pid {self.pid}) {why or how}"
        for run in self.runs.values():
            for rank in run.alive:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(run.pids[rank], signal.SIGKILL)
            run.lost = self.unusable

    def _reap(self) -> str:
        """Wait until it has ended. Returns how it ended."""
        code = reaping.wait_for_exit(self.pid) if self._popen is None else self._popen.wait()
        self._reaped = code is not None
        return "ended" if code is None else describe_exit(code)

    def close(self) -> None:
        """End the server and everything that it started. It would also end when the connection closes."""
        if not self._reaped:
            self.send(Quit())
            self._wait_until_disconnected()
            self._reap()
        self._channel.close()
        self.loop.close()

    def _wait_until_disconnected(self) -> None:
        """Wait until the server closes its end. One that is stuck in an import is killed; its ranks die with it."""
        self.loop.forget(self._channel)
        loop, until, disconnected = EventLoop(), now() + _QUIT_PATIENCE, False

        def drain() -> None:
            nonlocal disconnected
            try:
                self._channel.receive()
            except (EOFError, OSError):
                disconnected = True

        loop.listen(self._channel, drain)
        while not disconnected:
            if not loop.step(until):
                os.kill(self.pid, signal.SIGKILL)
                break
        loop.close()


class Launcher:
    """Starts the ranks of this process: it owns the fork server, and the directory that holds the files of its runs."""

    def __init__(self, directory: Path | None = None):
        """`directory` belongs to this process alone and is removed when it ends; None makes one when needed."""
        self.owner = os.getpid()
        self.server: ForkServerClient | None = None
        # Modules that ranks had to import themselves. A runner preloads them in the process that forks this one.
        self.preload_hints: dict[str, None] = {}
        self._directory = directory
        self._closes_at_exit = False
        self._wanted = ""  # the setting under which the server was made
        self._printed: set[str] = set()
        self._in_use = False  # whether this process could not be forked as it uses an accelerator
        self._numbers = itertools.count()

    def session_directory(self) -> Path:
        """Where this process keeps the files of its runs. Removed at exit, or by the fork server if we are killed."""
        if self._directory is None:
            try:
                self._directory = Path(tempfile.mkdtemp(prefix="torch_testing_ext_"))
            except OSError as error:
                raise CannotStart(
                    f"no directory for the logs and results of ranks can be created: {error}. "
                    f"Free disk space, or set TMPDIR to a writable directory."
                ) from error
            if not self._closes_at_exit:
                self._closes_at_exit = True
                atexit.register(self._close_at_exit)
        self._directory.mkdir(parents=True, exist_ok=True)
        return self._directory

    def _close_at_exit(self) -> None:
        if self.owner == os.getpid():
            self.close()

    def close(self) -> None:
        """End the server and remove the session's files. The next launch makes new ones."""
        self._discard_server()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def launch(self, job: Job) -> Run:
        """Start the ranks of a job. Raises CannotStart."""
        job = settings.complete(job)
        wanted = settings.wanted_start(job)
        try:
            return self.launch_on(self._get_server(job.subject, wanted), job)
        except TryAnother:
            self._discard_server()
        _empty(job.directory)  # ranks of the failed attempt may have left files there, a rendezvous store for one
        try:
            return self.launch_on(self._get_server(job.subject, wanted), job)
        except TryAnother as why:
            raise CannotStart(f"two attempts to start the ranks failed: {why}") from None

    def launch_on(self, server: ForkServerClient, job: Job) -> Run:
        job = replace(job, inherits=server.method is StartMethod.FORK)
        run = Run(next(self._numbers), job, server)
        server.runs[run.number] = run
        server.send(Launch(run.number, pickle.dumps(job)))
        try:
            run.wait_until(lambda: bool(run.pids))
            if run.lost:
                raise TryAnother(run.lost)
        except BaseException:
            run.end(signal.SIGKILL)
            finish(run)
            raise
        return run

    # -- the server

    def prepare(self, subject: Named, imports: tuple[str, ...]) -> None:
        """Fork the server now if it would be forked at the first launch, and have it import these modules."""
        if self.server is not None:
            return
        wanted = settings.read().start
        if StartMethod.FORK in allowed_methods(wanted):
            self.server, _ = self.try_method(StartMethod.FORK, subject)
            self._wanted = wanted
            if self.server is not None and imports:
                self.server.send(Preload(imports, at_once=True))

    def _get_server(self, subject: Named, wanted: str) -> ForkServerClient:
        if self.server is not None and (self.server.unusable or not self._suits(self.server, wanted)):
            self._discard_server()
        if self.server is None:
            self.server, self._wanted = self._make_server(wanted, subject), wanted
        return self.server

    def _suits(self, server: ForkServerClient, wanted: str) -> bool:
        """Would this setting choose such a server? After another setting, a better method may be possible again."""
        first, *others = allowed_methods(wanted)
        return server.method is first or (wanted == self._wanted and server.method in others)

    def _discard_server(self) -> None:
        if self.server is not None:
            self.server.close()
            self.server = None

    def _make_server(self, wanted: str, subject: Named) -> ForkServerClient:
        reasons: list[str] = []
        for method in allowed_methods(wanted):
            if method is not StartMethod.FORK and "<locals>" in subject.qualname:
                break  # no other interpreter has this class
            if method is StartMethod.SPAWN and reasons:
                self._print_once(
                    f"ranks are started as new interpreters, which takes seconds, because {'; '.join(reasons)}"
                )
            server, unusable = self.try_method(method, subject)
            if server is not None:
                if method is StartMethod.FORK_FRESH and self._in_use:
                    self._print_once(
                        f"ranks are forked from a new interpreter, which takes seconds to start, because {reasons[0]}"
                    )
                return server
            reasons.append(f"{_SUBJECT_OF[method]}: {unusable}")
        return _explain_failure(wanted, subject, reasons)

    def try_method(self, method: StartMethod, subject: Named) -> tuple[ForkServerClient | None, str]:
        unsafe = (fork_safety.was_forked() or fork_safety.prepare_to_fork()) if method is StartMethod.FORK else None
        if unsafe is not None:
            return None, unsafe
        server = ForkServerClient(method, subject, self.session_directory())
        unsafe = server.wait_until_ready()
        if unsafe is None:
            return server, ""
        server.close()
        if method is StartMethod.FORK:
            self._in_use = server.accelerator_in_use
        return None, unsafe

    def _print_once(self, text: str) -> None:
        if text not in self._printed:
            self._printed.add(text)
            with suppress(Exception):  # a test may have closed or replaced it
                print(f"torch_testing_ext: {text}", file=sys.stderr, flush=True)

    # -- preload hints

    def add_preload_hints(self, run: Run, modules: tuple[str, ...]) -> None:
        """Have modules that the ranks of this run had to import themselves preloaded for the next ranks."""
        if modules:
            self.preload_hints.update(dict.fromkeys(modules))
            run.server.send(Preload(modules))


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


def allowed_methods(wanted: str) -> tuple[StartMethod, ...]:
    """The start methods to try under a setting, in order."""
    return _METHODS_OF[wanted]


def _explain_failure(wanted: str, subject: Named, reasons: list[str]) -> NoReturn:
    if "<locals>" in subject.qualname:
        why = "; ".join(reasons) or f"TORCH_TESTING_EXT_START={wanted}, or --sanitize=hash"
        raise CannotStart(
            f"{subject.qualname} is defined in a function: only ranks forked from this process have it; {why}"
        )
    if wanted.startswith("fork"):
        raise CannotStart(f"TORCH_TESTING_EXT_START={wanted}, but ranks cannot be forked: {'; '.join(reasons)}")
    raise CannotStart("no process that starts ranks could be made" + "".join(f"; {reason}" for reason in reasons))


def _empty(directory: Path) -> None:
    for entry in directory.iterdir():
        with suppress(OSError):
            entry.unlink()


# -- the launcher of this process

_current = Launcher()


def launcher() -> Launcher:
    """The launcher of this process.

    A child that a test forked has a copy of its parent's launcher, but not the processes: it gets its own launcher.
    """
    global _current
    if _current.owner != os.getpid():
        inherited, _current = _current, Launcher()
        _current.preload_hints = inherited.preload_hints
    return _current


def work_in(directory: Path) -> None:
    """Keep the files of this process's runs in `directory`, which holds nothing else and is removed with them."""
    global _current
    hints = _current.preload_hints
    _current = Launcher(directory)
    _current.preload_hints = hints


def launch(job: Job) -> Run:
    """Start the ranks of a job. Raises CannotStart."""
    return launcher().launch(job)


def prepare(body: Named, subject: Named, imports: tuple[str, ...] = ()) -> None:
    """Fork the fork server now, if that is possible: the ranks of such a job have the state of the process as it is.

    Does nothing where there is one, or where ranks have to be started in another way. A server only knows things that
    were named before it was forked, as the first two arguments are. `imports`: modules that the ranks will need.
    """
    with suppress(CannotStart):  # the launch will say why
        launcher().prepare(subject, imports)


def close() -> None:
    """End the fork server and its ranks, and remove their files. The next launch makes new ones."""
    if _current.owner == os.getpid():
        _current.close()


def finish(run: Run) -> None:
    """Forget a run that is over."""
    run.server.runs.pop(run.number, None)


def new_directory(name: str) -> Path:
    """A directory for one run's files: kept below TORCH_TESTING_EXT_LOGS if that is set."""
    parent = settings.read().logs or launcher().session_directory()
    safe = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in name)[-150:]
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count():
            directory = parent / (safe if number == 0 else f"{safe}.{number}")
            with suppress(FileExistsError):
                directory.mkdir()
                return directory
    except OSError as error:
        raise CannotStart(f"no directory for the files of ranks can be created: {error}") from error
    raise AssertionError
