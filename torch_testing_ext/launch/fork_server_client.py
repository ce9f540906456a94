"""A fork server as the process sees it that needs ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from torch_testing_ext._machine import ports
from torch_testing_ext._process import child, fork_safety, interpreter, reaping
from torch_testing_ext._process.channel import Channel, socket_pair
from torch_testing_ext._process.loop import EventLoop
from torch_testing_ext._process.messages import unexpected

from . import fork_server
from .fork_server_messages import (
    Dumped,
    Exited,
    FromServer,
    Hello,
    NeedsNewServer,
    Quit,
    Serve,
    Started,
    StartFailed,
    StartMethod,
    ToServer,
)
from .job import Named
from .rank_report import now
from .run import ANSWER_TIMEOUT, Run

_QUIT_TIMEOUT = 5.0
_HELLO_TIMEOUT = 120.0  # a new interpreter imports torch and the test module before it answers


class CannotStart(RuntimeError):
    """Ranks could not be started; the message gives the reason and the remedy."""


class ServerUnfit(Exception):
    """This server is gone, or does not have the class that is to be run; a new server would do."""


class ForkServerClient:
    """A fork server as this process sees it."""

    def __init__(self, method: StartMethod, subject: Named, directory: Path, inherited: Any = None):
        """`inherited` is for the contexts of ranks that are forked off this process."""
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
                self.pid = self._fork(Channel(theirs, ToServer), directory, inherited)
            else:
                self.pid = self._spawn(theirs.fileno(), directory, subject)
        self.loop.listen(self._channel, self._receive)

    def _fork(self, theirs: Channel[ToServer], directory: Path, inherited: Any) -> int:
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            with suppress(Exception):
                stream.flush()  # type: ignore[union-attr] # or both processes would write the buffered text
        parent = os.getpid()

        def serve() -> NoReturn:
            self._channel.close()
            ports.forget_leases()
            fork_server.begin(theirs, directory, StartMethod.FORK, parent, inherited=inherited)

        return child.fork_child(serve, killed_by=signal.SIGTERM)  # not SIGKILL: there may be ranks to end first

    def _spawn(self, theirs: int, directory: Path, subject: Named) -> int:
        command = interpreter.command("launch.fork_server", sys.path, str(theirs))
        self._popen = subprocess.Popen(command, pass_fds=[theirs])
        self.send(Serve(directory, self.method, os.getpid(), tuple(sys.argv), subject))
        return self._popen.pid

    def wait_until_ready(self) -> str | None:
        """Wait until it is ready. Returns the reason if it cannot serve, or None."""
        until = now() + _HELLO_TIMEOUT
        while self._hello is None and self.unusable is None:
            if not self.step(until):
                return f"it was not ready after {_HELLO_TIMEOUT:.0f} s"
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
        except (ServerUnfit, CannotStart):
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
            case NeedsNewServer(_, why):
                raise ServerUnfit(why)
            case StartFailed(_, why):
                raise CannotStart(f"ranks could not be started: {why}")
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
        how = self._reap() if not self._reaped else "ended"
        self.unusable = f"the process that starts the ranks (pid {self.pid}) {why or how}"
        for run in self.runs.values():
            for rank, pid in enumerate(run.pids):
                if rank not in run.exits:
                    with suppress(ProcessLookupError, PermissionError):
                        os.killpg(pid, signal.SIGKILL)
            run.lost = self.unusable

    def _reap(self) -> str:
        """Wait until it has ended. Returns how it ended."""
        code = reaping.wait_for_exit(self.pid) if self._popen is None else self._popen.wait()
        self._reaped = code is not None
        return "ended" if code is None else reaping.describe_exit(code)

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
        loop, until, disconnected = EventLoop(), now() + _QUIT_TIMEOUT, False

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
