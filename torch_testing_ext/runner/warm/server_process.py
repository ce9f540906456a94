"""The process of a warm server: it has imported torch, and forks the preloaded server of each run."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from torch_testing_ext._process import ends, file_reads, fork_safety, sessions, signals, system
from torch_testing_ext._process.channels import Channel
from torch_testing_ext._process.event_loop import ParentLoop
from torch_testing_ext._process.messages import unexpected
from torch_testing_ext._process.private_folders import socket_name

from .server_messages import (
    CheckFiles,
    ForkEnded,
    Fresh,
    KillRun,
    ServerStops,
    Stale,
    StartRun,
    StopServer,
    ToWarmServer,
)
from .stamps import Stamps

if TYPE_CHECKING:
    from collections.abc import Iterable

# Seconds between two looks whether runs can still find the server.
LOOK_INTERVAL = 2.0


def main() -> None:
    """`python -c "... main()" SOCKET IDLE MODULES...`; ends as soon as a fork listens, which goes on as the server."""
    place, idle, *modules = sys.argv[1:]
    stamps = Stamps()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    draft = f"{place}.{os.getpid()}"
    with socket_name(draft) as name:
        listener.bind(name)
    listener.listen(64)
    # Takes the place of the socket that a killed server has left.
    os.rename(draft, place)
    # Whoever has started this one is not to be its parent: a run ends all of its children.
    if os.fork() != 0:
        os._exit(0)
    # Not before: its socket changes the folder of that.
    stamps.begin()
    ServerProcess(listener, place, float(idle), stamps).serve(modules)
    os._exit(0)


class ServerProcess:
    """Serves the runs of one project, one connection each, until it is stale, idle or told to stop."""

    def __init__(self, listener: socket.socket, place: str, idle: float, stamps: Stamps):
        self._listener, self._place, self._idle, self._stamps = listener, place, idle, stamps
        self._socket = os.stat(place).st_ino
        # The connections of runs, by the pid of the preloaded server that was forked for them.
        self._runs: dict[int, Channel[ToWarmServer]] = {}
        self._connections: list[Channel[ToWarmServer]] = []
        # The modules that were imported, or that cannot be.
        self._tried: set[str] = set()
        # The reason why this process cannot be forked.
        self._unsafe: str | None = None
        # Children of imports.
        self._kept: frozenset[int] = frozenset()
        self._is_retired = False
        # Files that were just saved may have changed since they were read, without a trace in their stamps. The run for
        # which they were read gets what its own imports would have got; no later one does.
        self._is_young = False
        self._is_taken = False

    def serve(self, modules: Iterable[str]) -> None:
        """Import the modules, and serve."""
        file_reads.start()
        system.adopt_orphans()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._import(modules)
        self._loop = ParentLoop(self._reap)
        self._loop.listen(self._listener, self._accept)
        self._idle_timer = self._loop.after(self._idle, self._retire)
        self._loop.after(LOOK_INTERVAL, self._look)
        try:
            self._loop.run()
        finally:
            self._retire()
            for pid in self._runs:
                signals.signal_group(pid, signal.SIGTERM)
            for pid in self._runs:
                ends.wait_for_exit(pid)
            ends.end_children()

    def _import(self, modules: Iterable[str]) -> None:
        """Import what is missing of these modules."""
        from torch_testing_ext.runner.processes import preloaded_server

        missing = [name for name in modules if name not in self._tried]
        if not missing:
            return
        self._tried.update(missing)
        self._unsafe = preloaded_server.warm_up(missing, collapse=True)
        self._stamps.add_modules()
        self._is_young = self._stamps.unsettled() is not None
        self._kept = frozenset(system.children(os.getpid())) - self._runs.keys()

    # -- the life of the server

    def _is_there(self) -> bool:
        """Whether runs find this server. Its folders may have been removed."""
        with suppress(OSError):
            os.getcwd()
            return os.stat(self._place).st_ino == self._socket
        return False

    def _look(self) -> None:
        if self._is_there():
            self._loop.after(LOOK_INTERVAL, self._look)
        else:
            self._retire()

    def _retire(self) -> None:
        """Take no more runs, and end when those that go on have ended."""
        if not self._is_retired:
            self._is_retired = True
            self._loop.forget(self._listener)
            if self._is_there():
                with suppress(OSError):
                    os.unlink(self._place)
            self._listener.close()
        self._end_if_unused()

    def _end_if_unused(self) -> None:
        if self._connections or self._runs:
            return
        if self._is_retired:
            self._loop.stop()
        else:
            self._idle_timer.cancel()
            self._idle_timer = self._loop.after(self._idle, self._retire)

    # -- connections

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        channel: Channel[ToWarmServer] = Channel(client, ToWarmServer)
        self._connections.append(channel)
        self._idle_timer.cancel()
        self._loop.serve(channel, partial(self._on_message, channel), partial(self._on_end, channel))

    def _on_message(self, channel: Channel[ToWarmServer], message: ToWarmServer) -> None:
        match message:
            case CheckFiles():
                self._check(channel)
            case StartRun():
                self._start_run(channel, message)
            case KillRun():
                self._signal_run(channel, signal.SIGKILL)
            case StopServer():
                self._retire()
                channel.send(ServerStops())
            case _:
                unexpected(message)

    def _check(self, channel: Channel[ToWarmServer]) -> None:
        is_for_others = self._is_young and self._is_taken
        if self._unsafe is None and not is_for_others and self._stamps.changed() is None:
            self._is_taken = True
            channel.send(Fresh())
        else:
            # First: the client that learns it looks for another server.
            self._retire()
            channel.send(Stale())

    def _on_end(self, channel: Channel[ToWarmServer]) -> None:
        """The run is over, or was killed: then its preloaded server learns it as from its parent's death."""
        channel.close()
        self._connections.remove(channel)
        self._signal_run(channel, signal.SIGTERM)
        self._end_if_unused()

    # -- preloaded servers

    def _start_run(self, channel: Channel[ToWarmServer], request: StartRun) -> None:
        self._import(request.modules)
        pid = sessions.fork_child(partial(self._become_preloaded_server, request), signal.SIGTERM)
        self._runs[pid] = channel
        for fd in request.fds:
            os.close(fd)

    def _become_preloaded_server(self, request: StartRun) -> NoReturn:
        """Be the preloaded server of a run, in a fork of this process."""
        from torch_testing_ext.runner.processes import preloaded_server

        self._loop.abandon()
        self._listener.close()
        for connection in self._connections:
            connection.close()
        self._stamps.end()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signals.unblock()
        channel, log, cwd = request.fds
        os.fchdir(cwd)
        for number in (1, 2):
            os.dup2(log, number)
        os.close(log)
        os.close(cwd)
        os.environ.clear()
        os.environ.update(request.environ)
        _renew()
        system.adopt_orphans()
        preloaded_server.serve_run(channel, request.directory, self._unsafe)

    def _signal_run(self, channel: Channel[ToWarmServer], number: int) -> None:
        for pid, of_run in self._runs.items():
            if of_run is channel:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _reap(self) -> None:
        for pid, status in ends.reap():
            channel = self._runs.pop(pid, None)
            if channel is None:
                continue
            # What it has left running: this process has adopted that, too.
            ends.end_children(self._runs.keys() | self._kept)
            if channel in self._connections:
                channel.send(ForkEnded(status))
        self._end_if_unused()


def _renew() -> None:
    """Renew what a fork has of earlier runs: its parent's random numbers, and what is in folders."""
    fork_safety.of_process.mark_fork_safe()
    importlib.invalidate_caches()
    file_reads.look_again()
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
