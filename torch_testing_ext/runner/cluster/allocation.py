"""An allocation of Slurm for one run: salloc holds it until its command ends, and its command until our stream ends."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from torch_testing_ext._process import reaping
from torch_testing_ext._process.channel import socket_pair
from torch_testing_ext._process.exits import describe_exit
from torch_testing_ext._process.interpreter import tethered
from torch_testing_ext._process.logs import tail
from torch_testing_ext._process.loop import EventLoop

from .cluster_nodes import LauncherListener, NodeLauncher

END_TIMEOUT = 5.0  # seconds that salloc has to give the nodes back, which it tells the controller
KILL_TIMEOUT = 2.0
_CHUNK = 1 << 16
# The environment of the allocation, between empty entries. What is printed before it is not for us.
_HOLD = "printf '\\0\\0'; env -0; printf '\\0'; exec cat >/dev/null"

_HOLDS_NOTHING = "SALLOC_NO_SHELL"  # with it, salloc ends at once, and nobody gives the nodes back


@dataclass
class AllocatingLauncher:
    """Waits for nodes by salloc; then `steps` makes the launcher for them, from the environment of the allocation."""

    words: Sequence[str]  # the command, less what it runs
    steps: Callable[[Mapping[str, str]], NodeLauncher]
    folder: Path
    environ: Mapping[str, str]
    _failure: str = ""
    _name: str = field(default_factory=lambda: f"run_test-{uuid.uuid4().hex[:12]}")
    _process: subprocess.Popen[bytes] | None = None
    _launcher: NodeLauncher | None = None
    _unread: bytes = b""

    expected = 0

    @property
    def waits_for(self) -> str:
        if self._launcher is not None:
            return self._launcher.waits_for
        said = tail(self._log, lines=1)
        return f"an allocation of Slurm: {shlex.join(self.words)}" + (f" ({said})" if said else "")

    @property
    def failure(self) -> str:
        """No allocation, or no node of it that is left: there will be no other one."""
        return self._failure or (self._launcher.failure if self._launcher is not None else "")

    @property
    def _log(self) -> Path:
        return self.folder / "salloc.log"

    def open(self, loop: EventLoop, listener: LauncherListener) -> None:
        self._loop, self._listener = loop, listener
        self._stream, theirs = socket_pair()
        command = [*self.words, f"--job-name={self._name}", "sh", "-c", _HOLD]
        with theirs, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                tethered(command),
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=log,
                env={name: value for name, value in self.environ.items() if name != _HOLDS_NOTHING},
                start_new_session=True,  # Ctrl-C is for run_test.py
            )
        loop.listen(self._stream, self._receive)

    def _receive(self) -> None:
        data = _received(self._stream)
        if not data:
            self._loop.forget(self._stream)
            self._see_end()
            return
        if self._launcher is not None:
            return
        self._unread += data
        _, begun, rest = self._unread.partition(b"\0\0")
        entries, ended, _ = rest.partition(b"\0\0")
        if begun and ended:
            pairs = (os.fsdecode(entry).partition("=") for entry in entries.split(b"\0"))
            self._launcher = self.steps({name: value for name, _, value in pairs})
            self._launcher.open(self._loop, self._listener)

    def _see_end(self) -> None:
        """Nothing holds the allocation any more, if there was one: its agents end by themselves."""
        if self._launcher is None and self._process is not None:
            said = tail(self._log, lines=3) or describe_exit(_wait(self._process, KILL_TIMEOUT))
            self._failure = f"{shlex.join(self.words)} has allocated nothing: {said}"

    def release(self, name: str) -> None:
        if self._launcher is not None:
            self._launcher.release(name)

    def close(self) -> None:
        """End the agents, and give back the nodes, or the place in the queue for them."""
        if self._launcher is not None:
            self._launcher.close()
        process, self._process = self._process, None
        if process is None:
            return
        self._loop.forget(self._stream)
        self._stream.close()
        # Before it has begun its command, it would wait for the end of that.
        by_itself = 0.0 if self._launcher is None else END_TIMEOUT
        if reaping.end(process, by_itself=by_itself, after_sigterm=END_TIMEOUT) < 0:
            self._cancel()

    def _cancel(self) -> None:
        """salloc was killed, and has not given back what it held."""
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(
                ["scancel", "--quiet", f"--name={self._name}"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                env=dict(self.environ),
                timeout=END_TIMEOUT,
            )


def _received(stream: socket.socket) -> bytes:
    try:
        return stream.recv(_CHUNK)
    except ConnectionResetError:
        return b""


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
