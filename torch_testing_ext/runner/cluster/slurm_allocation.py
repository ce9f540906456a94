"""An allocation of Slurm for one run."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from torch_testing_ext._process import ends, interpreters
from torch_testing_ext._process.channels import socket_pair
from torch_testing_ext._process.event_loop import EventLoop
from torch_testing_ext._process.logs import tail

from .agent_messages import PrepareNode
from .cluster_nodes import ClusterNodes, NodeLauncher
from .remote_node import JoiningNode

# Seconds that salloc has to give the nodes back, which it tells the controller.
SALLOC_TIMEOUT = 5.0
KILL_TIMEOUT = 2.0


_OUTPUT_AT_ONCE = 1 << 16
# The environment of the allocation, between empty entries. What is printed before it is not for us.
_HOLD = "printf '\\0\\0'; env -0; printf '\\0'; exec cat >/dev/null"
# With it, salloc ends at once, and nobody gives the nodes back.
_HOLDS_NOTHING = "SALLOC_NO_SHELL"


@dataclass
class AllocatingLauncher(NodeLauncher):
    """Waits for nodes by salloc; then `steps` makes the launcher for them, from the environment of the allocation."""

    # The command, less what it runs.
    words: Sequence[str]
    steps: Callable[[Mapping[str, str]], NodeLauncher]
    folder: Path
    environ: Mapping[str, str]
    _failure: str = ""
    _name: str = field(default_factory=lambda: f"run_test-{uuid.uuid4().hex[:12]}")
    _process: subprocess.Popen[bytes] | None = None
    _launcher: NodeLauncher | None = None
    _unread: bytes = b""

    @property
    def waits_for(self) -> str:
        if self._launcher is not None:
            return self._launcher.waits_for
        words = f"an allocation of Slurm: {shlex.join(self.words)}"
        printed = tail(self._log, lines=1)
        return f"{words} ({printed})" if printed else words

    @property
    def failure(self) -> str:
        """No allocation, or no node of it that is left: there will be no other one."""
        if self._failure or self._launcher is None:
            return self._failure
        return self._launcher.failure

    @property
    def _log(self) -> Path:
        return self.folder / "salloc.log"

    def open(self, loop: EventLoop, nodes: ClusterNodes) -> None:
        self._loop, self._nodes = loop, nodes
        command = interpreters.tethered([*self.words, f"--job-name={self._name}", "sh", "-c", _HOLD])
        environ = {name: value for name, value in self.environ.items() if name != _HOLDS_NOTHING}
        self._process, self._stream = _started(command, self._log, environ)
        loop.listen(self._stream, self._receive)

    def _receive(self) -> None:
        """Read what the allocation prints: its environment, once, and its end."""
        try:
            data = self._stream.recv(_OUTPUT_AT_ONCE)
        except ConnectionResetError:
            data = b""
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
            self._launcher.open(self._loop, self._nodes)

    def _see_end(self) -> None:
        """Nothing holds the allocation any more, if there was one: its agents end by themselves."""
        if self._launcher is not None or self._process is None:
            return
        why = tail(self._log, lines=3)
        if not why:
            why = ends.how_it_ended(self._process, KILL_TIMEOUT) or ends.describe_exit(None)
        self._failure = f"{shlex.join(self.words)} allocated nothing: {why}"

    def release(self, name: str, refused: str = "") -> None:
        if self._launcher is not None:
            self._launcher.release(name)

    def close(self, at_once: bool) -> None:
        """End the agents, and give back the nodes, or the place in the queue for them."""
        if self._launcher is not None:
            self._launcher.close(at_once)
        process, self._process = self._process, None
        if process is None:
            return
        self._loop.forget(self._stream)
        self._stream.close()
        # Before it has begun its command, it would wait for the end of that.
        by_itself = 0.0 if self._launcher is None or at_once else SALLOC_TIMEOUT
        code = -1
        try:
            code = ends.end(process, by_itself=by_itself, after_sigterm=SALLOC_TIMEOUT)
        finally:
            # It has no exit code either if the user interrupts the wait.
            if code < 0:
                self._cancel()

    def _cancel(self) -> None:
        """salloc was killed, and has not given back what it held."""
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(
                ["scancel", "--quiet", f"--name={self._name}"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                env=dict(self.environ),
                timeout=SALLOC_TIMEOUT,
            )


def _started(
    command: Sequence[str], log: Path, environ: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a command, with a stream for its stdin and stdout. Ctrl-C is for the runner."""
    ours, theirs = socket_pair()
    with theirs, log.open("wb") as errors:
        end = theirs.fileno()
        process = subprocess.Popen(
            command, stdin=end, stdout=end, stderr=errors, env=dict(environ), start_new_session=True
        )
    return process, ours


# Seconds that a command may take to end after its stdin.
STEP_END_TIMEOUT = 2.0


@dataclass
class CommandLauncher(NodeLauncher):
    """Starts one command for each node. What they print on stderr is kept in `folder`."""

    # The commands that start agents, by name of node.
    commands: Mapping[str, Sequence[str]]
    prepare: PrepareNode
    folder: Path
    environ: Mapping[str, str]
    # The cores that a node gives us, where it may have more.
    cpus: Mapping[str, int] = field(default_factory=dict)
    # Accelerators that a node gives us.
    reserved: Mapping[str, int] = field(default_factory=dict)
    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def failure(self) -> str:
        """All nodes are there from the start: when the last has gone, none will come."""
        return "" if self._processes else "no node is left"

    def open(self, loop: EventLoop, nodes: ClusterNodes) -> None:
        for name, command in self.commands.items():
            limits = [limit for limit in (self.cpus.get(name), self.prepare.jobs) if limit is not None]
            jobs = min(limits, default=None)
            prepare = replace(self.prepare, jobs=jobs, reserved=self.reserved.get(name, 0))
            process, stream = _started(command, self._log(name), self.environ)
            self._processes[name] = process
            nodes.join(JoiningNode(name, stream, prepare, partial(self._how_it_ended, name)))

    def _log(self, name: str) -> Path:
        return self.folder / f"agent-{name}.log"

    def _how_it_ended(self, name: str) -> str:
        process = self._processes.get(name)
        if process is None:
            return "it was given back"
        how = f"its agent {ends.how_it_ended(process, STEP_END_TIMEOUT) or 'closed the connection'}"
        printed = tail(self._log(name), lines=5)
        return f"{how}: {printed}" if printed else how

    def release(self, name: str, refused: str = "") -> None:
        process = self._processes.pop(name, None)
        if process is not None:
            _end(process)

    def close(self, at_once: bool) -> None:
        """End all commands: their agents have ended everything below them when their stdin ends."""
        processes, self._processes = self._processes, {}
        for process in processes.values():
            _end(process, 0.0 if at_once else STEP_END_TIMEOUT)


def _end(process: subprocess.Popen[bytes], timeout: float = STEP_END_TIMEOUT) -> None:
    ends.end(process, by_itself=timeout, after_sigterm=timeout)
