"""A fork server as the process sees it that needs ranks, and its runs."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from torch_testing_ext._machine import ports
from torch_testing_ext._process import ends, fork_safety, interpreters, sessions
from torch_testing_ext._process.channels import Channel, socket_pair
from torch_testing_ext._process.event_loop import EventLoop, wait_readable
from torch_testing_ext._process.fork_host import Exit
from torch_testing_ext._process.messages import unexpected
from torch_testing_ext._tests import notes
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.launch import fork_server_messages
from torch_testing_ext.launch.accounts import now
from torch_testing_ext.launch.causes import Cause
from torch_testing_ext.launch.jobs import Job
from torch_testing_ext.launch.named import Named

# Keeps these frames out of tracebacks: the message is complete.
__unittest = True
# The same in pytest.
__tracebackhide__ = True


# A server answers in milliseconds unless it is importing a module. A server that is stuck must not block this process.
ANSWER_TIMEOUT = 30.0
_QUIT_TIMEOUT = 5.0
# A new interpreter imports torch and the test module before it answers.
_HELLO_TIMEOUT = 120.0


class CannotStart(RuntimeError):
    """Ranks could not be started; the message gives the reason and the remedy."""

    outcome = TestOutcome.ERROR
    cause_of_failure = Cause.OWN

    def __init__(self, message: str, *, is_refused: bool = False):
        """`is_refused`: by the system, as for a limit or a full disk: no other way to start ranks would help."""
        super().__init__(message)
        self.is_refused = is_refused


class ServerUnfit(Exception):
    """This server is gone, or does not have the class that is to be run; a new server would do."""


class ForkServerClient:
    """A fork server as this process sees it."""

    def __init__(
        self, method: fork_server_messages.StartMethod, subject: Named, directory: Path, inherited: Any = None
    ):
        """`inherited` is for the contexts of ranks that are forked off this process."""
        self.method = method
        # The reason why it must not be used for another run.
        self.unusable: str | None = None
        self.runs: dict[int, Run] = {}
        self.loop = EventLoop()
        # Then it is unsafe to fork.
        self.accelerator_in_use = False
        self._hello: fork_server_messages.Hello | None = None
        self._reaped = False
        ours, theirs = socket_pair()
        self._channel: Channel[fork_server_messages.FromServer] = Channel(ours, fork_server_messages.FromServer)
        self._popen: subprocess.Popen[bytes] | None = None
        about = fork_server_messages.Serve(directory, method, os.getpid(), tuple(sys.argv), subject)
        try:
            with theirs:
                if method is fork_server_messages.StartMethod.FORK:
                    self.pid = self._fork(theirs, about, inherited)
                else:
                    self.pid = self._spawn(theirs, about)
        except OSError:
            self._channel.close()
            self.loop.close()
            raise
        self.loop.listen(self._channel, self._receive)

    def _fork(self, theirs: socket.socket, about: fork_server_messages.Serve, inherited: Any) -> int:
        # Not at the top: many processes that import this start no ranks. Not in the child: other children need it, too.
        from torch_testing_ext.launch.fork_server import begin

        def serve() -> NoReturn:
            self._channel.close()
            ports.forget_leases()
            if inherited is None:  # it serves to the end
                sessions.leave_connections(theirs.fileno())
            begin(Channel(theirs, fork_server_messages.ToServer), about, inherited)

        # Not SIGKILL: there may be ranks to end first.
        return sessions.fork_child(serve, killed_by=signal.SIGTERM)

    def _spawn(self, theirs: socket.socket, about: fork_server_messages.Serve) -> int:
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
        if self._hello.unsafe or self.method is not fork_server_messages.StartMethod.FORK:
            return self._hello.unsafe
        return fork_safety.check_after_fork()

    def send(self, message: fork_server_messages.ToServer) -> None:
        self._channel.send(message)

    def _receive(self) -> None:
        try:
            for message in self._channel.receive():
                self._on_message(message)
        except (EOFError, OSError):
            self._lose()
        except BaseException:
            # Interrupted: messages may be lost.
            self.give_up()
            raise

    def _on_message(self, message: fork_server_messages.FromServer) -> None:
        match message:
            case fork_server_messages.Hello():
                self._hello = message
                self.accelerator_in_use = message.in_use
            # Messages about a run that has been finished are ignored.
            case fork_server_messages.Started(run, pids):
                if run in self.runs:
                    self.runs[run].pids = pids
            case fork_server_messages.StartedRank(run, rank, pid):
                if run in self.runs:
                    self.runs[run].on_started(rank, pid)
            case fork_server_messages.Exited(run, rank, exit):
                notes.note_left_running(f"rank {rank}: {process}" for process in exit.leftovers)
                if run in self.runs:
                    self.runs[run].exits[rank] = exit
            case fork_server_messages.Dumped(run):
                if run in self.runs:
                    self.runs[run].dumped = True
            case fork_server_messages.StartFailed(run, why, needs_new_server):
                if run in self.runs:
                    unfit = ServerUnfit(why) if needs_new_server else None
                    refused = CannotStart(f"ranks could not be started: {why}", is_refused=True)
                    self.runs[run].why_not_started = unfit or refused
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
            self.send(fork_server_messages.Quit())
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
    # Ranks that are being started later than the others, or again.
    starting: set[int] = field(default_factory=set)
    # The failure of the latest start, until it is raised.
    why_not_started: ServerUnfit | CannotStart | None = None

    @property
    def alive(self) -> list[int]:
        """The ranks that are still running."""
        if self.lost:
            return []
        return [rank for rank in range(len(self.pids)) if rank not in self.exits]

    def wait_for_event(self, until: float | None = None) -> bool:
        """Wait for the next event and handle it. Returns False if the time `until` came first."""
        return self.server.loop.step(until)

    @property
    def waiting(self) -> range:
        """The ranks whose turn has not come."""
        return range(len(self.pids), self.job.world_size)

    def start_next(self) -> int:
        """Start the next rank whose turn has not come, and return it."""
        rank = len(self.pids)
        self._start(rank, self.job)
        return rank

    def restart(self, rank: int, incarnation: int) -> None:
        """Start a rank again that has ended, as another process of it: the first one had number 0."""
        self._start(rank, replace(self.job, incarnation=incarnation))

    def _start(self, rank: int, job: Job) -> None:
        self.starting.add(rank)
        self.server.send(fork_server_messages.Start(self.number, rank, pickle.dumps(job)))
        self.wait_for_start(lambda: rank not in self.starting)

    def wait_for_start(self, done: Callable[[], bool]) -> None:
        """Wait until what this run has asked for has started. Raises CannotStart, or ServerUnfit."""
        # Not where its message is read: ends of ranks that come with it count, too.
        self.wait_until(lambda: done() or self.why_not_started is not None)
        failure, self.why_not_started = self.why_not_started, None
        if failure is not None:
            raise failure

    def on_started(self, rank: int, pid: int) -> None:
        self.exits.pop(rank, None)
        self.pids = (*self.pids[:rank], pid, *self.pids[rank + 1 :])
        self.starting.discard(rank)

    def signal(self, number: int, rank: int | None = None) -> None:
        """Signal all ranks that are still running, with all processes in their groups; or one rank alone."""
        self.server.send(fork_server_messages.Signal(self.number, number, rank))

    def dump(self, timeout: float, ranks: Iterable[int] | None = None) -> None:
        """Have these ranks, or all that are still running, write their stacks and flight recorders."""
        self.dumped = False
        asked = tuple(self.alive if ranks is None else ranks)
        self.server.send(fork_server_messages.Dump(self.number, asked, timeout))
        self.wait_until(lambda: self.dumped, timeout)

    def probe(self, ranks: Iterable[int]) -> None:
        """Ask these ranks, which are still running, for their collectives. They write these when they get to it."""
        self.server.send(fork_server_messages.Probe(self.number, tuple(ranks)))

    def wait_until(self, done: Callable[[], bool], timeout: float = 0.0) -> None:
        """Wait until `done`, which a working server achieves at once; give up a server that is stuck."""
        until = now() + timeout + ANSWER_TIMEOUT
        while not done() and not self.lost:
            if not self.wait_for_event(until):
                self.server.give_up()
