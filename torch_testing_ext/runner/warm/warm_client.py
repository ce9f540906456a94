"""The warm server, as a run sees it: its place, its start and end, and the preloaded server that it forks."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from torch_testing_ext._process import interpreters, system
from torch_testing_ext._process.channels import Channel
from torch_testing_ext._process.event_loop import wait_readable
from torch_testing_ext._process.private_folders import UnsafeFolder, make_private, socket_name
from torch_testing_ext._tests.launcher_variables import without_launch

from .server_key import project_key, server_key
from .server_messages import CheckFiles, ForkEnded, Fresh, FromWarmServer, KillRun, StartRun, StopServer

# Seconds without a run after which a server ends.
IDLE = 1800.0
# The most servers of one user.
MOST_SERVERS = 4
# Seconds. A server that starts imports torch before it answers; one that runs may be importing for another run.
_START_TIMEOUT = 120.0
_ANSWER_TIMEOUT = 30.0


class WarmServer:
    """A connection to a warm server, for one run."""

    def __init__(self, channel: Channel[FromWarmServer]):
        self._channel = channel
        self.is_lost = False

    def is_fresh(self, timeout: float) -> bool:
        """Whether the server can start a run. It ends if its files have changed."""
        self._channel.send(CheckFiles())
        return isinstance(self.next_answer(time.monotonic() + timeout), Fresh)

    def start_run(
        self, directory: Path, modules: Iterable[str], environ: Mapping[str, str], channel: int, log: int
    ) -> WarmProcess | None:
        """Have the server fork the preloaded server of a run; None if the server is gone."""
        if self.is_lost:
            return None
        cwd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            request = StartRun(directory=str(directory), modules=tuple(modules), environ=environ)
            self._channel.send(request, channel, log, cwd)
        finally:
            os.close(cwd)
        return WarmProcess(self)

    def next_answer(self, until: float | None) -> FromWarmServer | None:
        """Wait for an answer; None if the time has come first, or the server is gone (`is_lost`)."""
        if not wait_readable(self._channel, until):
            return None
        try:
            # The server answers one question at a time.
            return next(iter(self._channel.receive()), None)
        except (EOFError, OSError):
            self.is_lost = True
            return None

    def kill_run(self) -> None:
        self._channel.send(KillRun())

    def stop(self) -> None:
        """Have the server take no more runs; it ends when those that go on have ended."""
        self._channel.send(StopServer())
        self.next_answer(time.monotonic() + _ANSWER_TIMEOUT)
        self.close()

    def close(self) -> None:
        """Let the server know that the run is over."""
        self._channel.close()


class WarmProcess:
    """The preloaded server that a warm server has forked: the part of `subprocess.Popen` that a run needs."""

    def __init__(self, server: WarmServer):
        self._server = server
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        until = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            answer = self._server.next_answer(until)
            if isinstance(answer, ForkEnded):
                self.returncode = os.waitstatus_to_exitcode(answer.status)
            elif self._server.is_lost:
                # The end of a warm server ends the preloaded servers that it has forked.
                self.returncode = -signal.SIGTERM
            elif until is not None and time.monotonic() >= until:
                raise subprocess.TimeoutExpired("the preloaded server", timeout or 0.0)
        return self.returncode

    def kill(self) -> None:
        self._server.kill_run()


def find_server(
    root: Path, path: Sequence[str], environ: Mapping[str, str], modules: Iterable[str], may_start: bool
) -> WarmServer | None:
    """The warm server for a run of this process; None if there is none, or it cannot be used.

    `path`, `environ`, `modules`: those of the preloaded server. `may_start`: start a server if none runs. One whose
    files have changed is replaced in any case.
    """
    # A server must not look like a rank of a launch; what a run of tests starts belongs to that run.
    if not system.LINUX or interpreters.RUN_FIRST or without_launch(environ) != dict(environ):
        return None
    with suppress(OSError):
        folder = folder_of_servers()
        place = os.path.join(folder, f"{project_key(root)}-{server_key(path, environ)}.socket")
        server = _connect(place)
        if server is not None and not server.is_fresh(_ANSWER_TIMEOUT):
            server.close()
            server, may_start = None, True
        if server is None and may_start:
            return _start(folder, place, path, environ, modules)
        return server
    return None


def stop_servers(root: Path) -> None:
    """End the servers of a project in this environment, as soon as no run uses them."""
    with suppress(OSError):
        folder = folder_of_servers()
        for place in _sockets(folder):
            if os.path.basename(place).startswith(f"{project_key(root)}-"):
                _stop(place)


def folder_of_servers() -> str:
    """The private folder of this user's servers. Raises OSError if it cannot be made, or trusted."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    parent = runtime if os.path.isdir(runtime) else "/tmp"
    path = os.path.join(parent, f"torch_testing_ext_warm_{os.getuid()}")
    try:
        return make_private(path, refused=0o077)
    except UnsafeFolder as error:
        raise PermissionError(str(error)) from None


def _start(
    folder: str, place: str, path: Sequence[str], environ: Mapping[str, str], modules: Iterable[str]
) -> WarmServer | None:
    """Start a server, unless another run has just done so, and connect to it; None if it cannot serve."""
    with open(os.path.join(folder, "lock"), "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        server = _connect(place)
        if server is None:
            for other in _sockets(folder)[: 1 - MOST_SERVERS]:
                _stop(other)
            _spawn(place, path, environ, modules)
            server = _connect(place)
    if server is not None and not server.is_fresh(_START_TIMEOUT):
        server.close()
        return None
    return server


def _spawn(place: str, path: Sequence[str], environ: Mapping[str, str], modules: Iterable[str]) -> None:
    """Start the process of a server, and wait until it listens."""
    words = interpreters.command("runner.warm.server_process", path, place, str(IDLE), *modules)
    # The server is a fork of this process, which ends when it listens: nothing is left of it here.
    subprocess.run(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=dict(environ),
        start_new_session=True,
        check=False,
    )


def _connect(place: str) -> WarmServer | None:
    """Connect to the server at a place. Removes the socket that a killed one has left."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with socket_name(place) as name:
            client.connect(name)
        _, user, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    except ConnectionRefusedError:
        client.close()
        with suppress(FileNotFoundError):
            os.unlink(place)
        return None
    except OSError:
        client.close()
        return None
    if user != os.getuid():
        client.close()
        return None
    return WarmServer(Channel(client, FromWarmServer))


def _stop(place: str) -> None:
    server = _connect(place)
    if server is not None:
        server.stop()


def _sockets(folder: str) -> list[str]:
    """The sockets in the folder of servers, the oldest first."""
    ages = {}
    for name in os.listdir(folder):
        # A server that ends removes its own.
        with suppress(FileNotFoundError):
            if name.endswith(".socket"):
                path = os.path.join(folder, name)
                ages[path] = os.stat(path).st_mtime
    return sorted(ages, key=lambda path: ages[path])
