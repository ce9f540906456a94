"""The parent's side: one server for this process, made when first needed, and the runs it carries out.

Which kind of server: forked off this process where that is safe (nothing is imported twice), else a new interpreter
that imports the test module, else one that spawns each rank. The choice can be forced by TORCH_TESTING_EXT_START.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from torch_testing_ext._process import fork_safety

from . import fork_server, settings, starting
from .fork_server import StartMethod
from .job import Job, Named
from .report import Exit, now, signal_name

_QUIT_PATIENCE = 5.0
_HELLO_PATIENCE = 120.0  # a new interpreter imports torch and the test module before it answers
# A server answers in milliseconds, unless it is in the middle of an import. One that is stuck must not take us along.
_ANSWER_PATIENCE = 30.0


class CannotStart(RuntimeError):
    """Ranks could not be started; the message says why and what to do."""


@dataclass
class Run:
    """One job on its way: what the server told of it so far."""

    number: int
    job: Job
    server: ForkServerClient
    began: float = field(default_factory=now)
    pids: list[int] = field(default_factory=list)
    exits: dict[int, Exit] = field(default_factory=dict)
    dumped: bool = False
    lost: str | None = None  # why the server is gone, if it is

    @property
    def alive(self) -> list[int]:
        return [] if self.lost else [rank for rank in range(len(self.pids)) if rank not in self.exits]

    def wait_for_news(self, until: float | None = None, bells: Sequence[int] = ()) -> bool:
        """Take in the next thing the server tells of this run, or come back when one of these descriptors is readable;
        False when the time `until` came first."""
        return self.server.take_message(until, bells)

    def end(self, number: int) -> None:
        """Signal all ranks that still run, with all that they started in their groups."""
        self.server.send("kill", self.number, None, number)

    def signal(self, number: int, rank: int) -> None:
        """Signal one rank and nothing else."""
        self.server.send("signal", self.number, rank, number)

    def dump(self, patience: float, ranks: list[int] | None = None) -> None:
        """Have these ranks, or all that still run, write down where they are."""
        self.dumped = False
        self.server.send("dump", self.number, self.alive if ranks is None else ranks, patience)
        self.insist(lambda: self.dumped, patience)

    def insist(self, done: Callable[[], bool], patience: float = 0.0) -> None:
        """Wait for what the server does at once if it does anything at all; give a stuck one up."""
        until = now() + patience + _ANSWER_PATIENCE
        while not done() and not self.lost:
            if not self.wait_for_news(until):
                self.server.give_up()


class ForkServerClient:
    def __init__(self, kind: StartMethod, subject: Named):
        self.kind = kind
        self.unfit: str | None = None  # why it should not be used for another run
        self.runs: dict[int, Run] = {}
        self._directory = session_directory()
        self._reaped = False
        self._connection, theirs = _pipe()
        self._popen: subprocess.Popen[bytes] | None = None
        try:
            self.pid = self._fork(theirs) if kind is StartMethod.FORK else self._spawn(theirs, subject)
        finally:
            theirs.close()

    def _fork(self, theirs: Connection) -> int:
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            with suppress(Exception):
                stream.flush()  # type: ignore[union-attr] # or both processes would write what is in the buffers
        parent = os.getpid()
        # Ctrl-C in the child, before it is a server, would unwind into the test runner a second time.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            pid = fork_safety.fork()
            if pid == 0:
                try:
                    self._connection.close()
                    fork_server.begin(theirs, self._directory, StartMethod.FORK, parent)
                finally:
                    os._exit(1)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return pid

    def _spawn(self, theirs: Connection, subject: Named) -> int:
        command = starting.command("launch.fork_server", sys.path, str(theirs.fileno()))
        self._popen = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        first = fork_server.FirstWords(self._directory, self.kind, os.getpid(), tuple(sys.argv), subject)
        self._connection.send(first)
        return self._popen.pid

    def greet(self) -> str | None:
        """Wait until it is ready. Returns why it cannot serve, or None."""
        try:
            if not self._connection.poll(_HELLO_PATIENCE):
                return f"it was not ready after {_HELLO_PATIENCE:.0f} s"
            reason = self._connection.recv()[1]
        except (EOFError, OSError):
            return "it ended while it was getting ready (its error is printed above)"
        return reason or (fork_safety.check_after_fork() if self.kind is StartMethod.FORK else None)

    def send(self, *message: Any) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):
            self._connection.send(message)

    def take_message(self, until: float | None, bells: Sequence[int] = ()) -> bool:
        timeout = None if until is None else max(0.0, until - now())
        ready = wait([self._connection, *bells], timeout)
        if self._connection not in ready:
            return bool(ready)
        try:
            news, *details = self._connection.recv()
        except (EOFError, OSError):
            self._lose()
            return True
        except BaseException:
            self.give_up()  # half a message is read: nothing that follows could be understood
            raise
        getattr(self, f"_on_{news}")(*details)
        return True

    # News of a run that nobody waits for any more is no news.

    def _on_started(self, number: int, pids: list[int]) -> None:
        if number in self.runs:
            self.runs[number].pids = pids

    def _on_exited(self, number: int, rank: int, exit: Exit) -> None:
        if number in self.runs:
            self.runs[number].exits[rank] = exit

    def _on_dumped(self, number: int) -> None:
        if number in self.runs:
            self.runs[number].dumped = True

    def _on_unknown(self, number: int, why: str) -> None:
        raise _TryAnother(why)

    def _on_failed(self, number: int, why: str) -> None:
        raise CannotStart(f"ranks could not be started: {why}")

    def give_up(self) -> None:
        """It does not answer. Its ranks die with it."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._lose(f"did not answer for {_ANSWER_PATIENCE:.0f} s")

    def _lose(self, why: str = "") -> None:
        """The server is gone. Its ranks die with it by the kernel's hand; their groups by ours."""
        how = self._reap() if not self._reaped else "ended"
        how = why or how
        self.unfit = f"the process that starts the ranks (pid {self.pid}) {how}"
        for run in self.runs.values():
            for rank in run.alive:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(run.pids[rank], signal.SIGKILL)
            run.lost = self.unfit

    def _reap(self) -> str:
        try:
            if self._popen is not None:
                code = self._popen.wait()
            else:
                code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:
            return "ended"
        self._reaped = True
        return f"was killed by {signal_name(-code)}" if code < 0 else f"ended with code {code}"

    def close(self) -> None:
        """End it, and with it whatever it started. It ends by itself when the connection closes."""
        if not self._reaped:
            self.send("quit")
            self._wait_until_it_hangs_up()
            self._reap()
        self._connection.close()

    def _wait_until_it_hangs_up(self) -> None:
        """Should it be stuck in an import, it is killed; its ranks die with it."""
        until = now() + _QUIT_PATIENCE
        with suppress(EOFError, OSError):
            while wait([self._connection], max(0.0, until - now())):
                self._connection.recv()
            os.kill(self.pid, signal.SIGKILL)


def _pipe() -> tuple[Connection, Connection]:
    """Not on descriptors 0 to 2, should this process have closed some: whoever prints would print into it."""
    with ExitStack() as fillers:
        while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
            fillers.callback(os.close, fd)
        os.close(fd)
        return Pipe()


class _TryAnother(Exception):
    """This server is gone, or does not have the class that is to be run; one made now would serve."""


# One server and one session directory for a process. A child forked by a test has these names too, but not the
# processes: hence the pid.
_owner: int | None = None
_server: ForkServerClient | None = None
_session: Path | None = None
_said: set[str] = set()
_numbers = count()


def session_directory() -> Path:
    """Where this process keeps the files of its runs. Removed at exit, by the server if we are killed."""
    global _session, _owner
    if _owner != os.getpid():
        _forget()
    if _session is None:
        try:
            _session = Path(tempfile.mkdtemp(prefix="torch_testing_ext_"))
        except OSError as error:
            raise CannotStart(
                f"no directory for the logs and results of ranks can be made: {error}. "
                f"Make room, or set TMPDIR to a directory that can be written to."
            ) from error
        if _owner is None:
            atexit.register(close)
        _owner = os.getpid()
    return _session


def work_in(directory: Path) -> None:
    """Keep the files of this process's runs there, in a directory that is theirs alone: it goes with them."""
    global _session, _owner
    _forget()
    _session, _owner = directory, os.getpid()


def _forget() -> None:
    global _server, _session, _owner
    _server = _session = _owner = None
    _said.clear()


def close() -> None:
    """End the server and remove the session's files. The next launch makes new ones."""
    global _session
    if _owner != os.getpid():
        return
    _discard()
    if _session is not None:
        shutil.rmtree(_session, ignore_errors=True)
        _session = None


def _discard() -> None:
    global _server
    if _server is not None:
        _server.close()
        _server = None


def launch(job: Job) -> Run:
    """Start the ranks of a job. Raises CannotStart."""
    try:
        return _launch_on(_get_server(job.subject), job)
    except _TryAnother:
        _discard()
    _empty(job.directory)  # ranks of a first attempt that died may have left a store to meet in, and more
    try:
        return _launch_on(_get_server(job.subject), job)
    except _TryAnother as why:
        raise CannotStart(f"the ranks could not be started, twice: {why}") from None


def _empty(directory: Path) -> None:
    for entry in directory.iterdir():
        with suppress(OSError):
            entry.unlink()


def _launch_on(server: ForkServerClient, job: Job) -> Run:
    job = replace(job, inherits=server.kind is StartMethod.FORK)
    run = Run(next(_numbers), job, server)
    server.runs[run.number] = run
    server.send("launch", run.number, job)
    try:
        run.insist(lambda: bool(run.pids))
        if run.lost:
            raise _TryAnother(run.lost)
    except BaseException:
        run.end(signal.SIGKILL)
        finish(run)
        raise
    return run


def finish(run: Run) -> None:
    """Forget a run that is over."""
    run.server.runs.pop(run.number, None)


def _get_server(subject: Named) -> ForkServerClient:
    global _server
    if _owner != os.getpid():
        _forget()
    wanted = settings.read().start
    if _server is not None and (_server.unfit or (_is_bare(_server) != (wanted == "spawn") and wanted != "auto")):
        _discard()
    if _server is None:
        _server = _make_server(wanted, subject)
    return _server


def _is_bare(server: ForkServerClient) -> bool:
    return server.kind is StartMethod.SPAWN


def _make_server(wanted: str, subject: Named) -> ForkServerClient:
    reasons: list[str] = []
    for kind in (StartMethod.FORK, StartMethod.FORK_FRESH) if wanted != "spawn" else ():
        made, reasons = _try(kind, subject, reasons)
        if made is not None:
            return made
        if "<locals>" in subject.qualname:
            break  # no other interpreter has it
    if "<locals>" in subject.qualname:
        why = "; ".join(reasons) or "TORCH_TESTING_EXT_START=spawn"
        raise CannotStart(
            f"{subject.qualname} is made in a function: only ranks forked off this process have it; {why}"
        )
    if wanted == "fork":
        raise CannotStart(f"TORCH_TESTING_EXT_START=fork, but ranks cannot be forked: {'; '.join(reasons)}")
    if reasons:
        _say_once(f"ranks are started as new interpreters, which takes seconds, since {'; '.join(reasons)}")
    made, reasons = _try(StartMethod.SPAWN, subject, reasons)
    return made or _give_up(reasons)


def _try(kind: StartMethod, subject: Named, reasons: list[str]) -> tuple[ForkServerClient | None, list[str]]:
    unfit = (fork_safety.was_forked() or fork_safety.prepare_to_fork()) if kind is StartMethod.FORK else None
    if unfit is None:
        made = ForkServerClient(kind, subject)
        unfit = made.greet()
        if unfit is None:
            return made, reasons
        made.close()
    return None, [*reasons, f"{_WHO[kind]}: {unfit}"]


_WHO = {
    StartMethod.FORK: "this process cannot be forked",
    StartMethod.FORK_FRESH: "a new interpreter cannot either",
    StartMethod.SPAWN: "an interpreter to start them from cannot serve",
}


def _give_up(reasons: list[str]) -> ForkServerClient:
    raise CannotStart("no process could be made that starts ranks" + "".join(f"; {reason}" for reason in reasons))


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        print(f"torch_testing_ext: {text}", file=sys.stderr, flush=True)


def new_directory(name: str) -> Path:
    """A directory for one run's files: kept below TORCH_TESTING_EXT_LOGS where that is set."""
    parent = settings.read().logs or session_directory()
    safe = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in name)[-150:]
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for number in count():
            directory = parent / (safe if number == 0 else f"{safe}.{number}")
            with suppress(FileExistsError):
                directory.mkdir()
                return directory
    except OSError as error:
        raise CannotStart(f"no directory for the files of ranks can be made: {error}") from error
    raise AssertionError


# What ranks of this process had to import by themselves. An embracing runner teaches it to whom it forks us off.
preload_hints: dict[str, None] = {}


def add_preload_hints(run: Run, modules: tuple[str, ...]) -> None:
    """What each rank had to import by itself, the next ones shall find imported."""
    if modules:
        preload_hints.update(dict.fromkeys(modules))
        run.server.send("preload", list(modules))
