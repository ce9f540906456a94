"""A program that a warm server runs for this process, which goes on: the preloaded server of run_test.py."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence

from torch_testing_ext._process import system

from . import server_link
from .server_link import ProgramEnded, SendSignal
from .warm_client import OFF, NoServer, ServerAddress, WarmProgram, begin, hand_over


def find_server(may_start: bool) -> ServerAddress | None:
    """The server for this process, if one runs, or may be started."""
    if not system.LINUX or os.environ.get(OFF) == "0":
        return None
    with contextlib.suppress(NoServer, OSError):
        address = ServerAddress(subprocess._args_from_interpreter_flags())  # type: ignore[attr-defined]
        client = address.connect() or (address.start() if may_start else None)
        if client is not None:
            client.close()
            return address
    return None


class ServedProcess:
    """The program: of `subprocess.Popen`, the part that the runner needs."""

    def __init__(self, client: socket.socket):
        self._client = client
        self.returncode: int | None = None

    @classmethod
    def start(
        cls, address: ServerAddress, command: Sequence[str], log: int, kept: int, environ: Mapping[str, str]
    ) -> ServedProcess | None:
        """Start `python ... -c CODE WORDS`, as `subprocess.Popen` would; None if the server does not."""
        client = address.connect()
        if client is None:
            return None
        program = WarmProgram("-c", [*command[command.index("-c") + 1 :]])
        with open(os.devnull, "rb") as null:
            fds = {0: null.fileno(), 1: log, 2: log, kept: kept}
            try:
                hand_over(client, program, dict(environ), fds, leads=False, adopts=True)
                begin(client)
            except (NoServer, OSError):
                client.close()
                return None
        return cls(client)

    def wait(self, timeout: float | None = None) -> int:
        while self.returncode is None:
            ready, _, _ = select.select([self._client], [], [], timeout)
            if not ready:
                raise subprocess.TimeoutExpired("a program of a warm server", timeout or 0.0)
            self.returncode = self._next_news()
        self._client.close()
        return self.returncode

    def _next_news(self) -> int | None:
        """Receive a message of the supervisor. Returns the exit code of the program if it has ended."""
        try:
            news, _ = server_link.receive(self._client)
        except (EOFError, OSError):
            # The supervisor was killed, and with it the program.
            return -signal.SIGKILL
        return os.waitstatus_to_exitcode(news.status) if isinstance(news, ProgramEnded) else None

    def kill(self) -> None:
        if self.returncode is None:
            with contextlib.suppress(OSError):
                server_link.send(self._client, SendSignal(signal.SIGKILL))
