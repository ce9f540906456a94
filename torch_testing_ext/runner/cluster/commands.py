"""Agents that are started by commands of this machine, such as srun: each speaks on its command's stdin and stdout."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from socket import socket

from torch_testing_ext._process import reaping
from torch_testing_ext._process.channel import socket_pair
from torch_testing_ext._process.logs import tail
from torch_testing_ext._process.loop import EventLoop

from .agent_messages import PrepareNode
from .cluster_nodes import JoiningNode, LauncherListener

END_TIMEOUT = 2.0  # seconds that a command may take to end after its stdin


@dataclass
class CommandLauncher:
    """Starts one command for each node. What they print on stderr is kept in `folder`."""

    commands: Mapping[str, Sequence[str]]  # by name of node
    prepare: PrepareNode
    folder: Path
    environ: Mapping[str, str]
    cpus: Mapping[str, int] = field(default_factory=dict)  # that a node gives us, where it may have more
    reserved: Mapping[str, int] = field(default_factory=dict)  # accelerators that a node gives us
    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    waits_for = ""
    expected = 0

    @property
    def failure(self) -> str:
        """All nodes are there from the start: when the last has gone, none will come."""
        return "" if self._processes else "no node is left"

    def open(self, loop: EventLoop, listener: LauncherListener) -> None:
        for name, command in self.commands.items():
            prepare = replace(
                self.prepare,
                jobs=self._jobs(name),
                reserved=self.reserved.get(name, 0),
            )
            listener.join(JoiningNode(name, self._start(name, command), prepare, partial(self._how_it_ended, name)))

    def _jobs(self, name: str) -> int | None:
        limits = [limit for limit in (self.cpus.get(name), self.prepare.jobs) if limit is not None]
        return min(limits, default=None)

    def _start(self, name: str, command: Sequence[str]) -> socket:
        ours, theirs = socket_pair()
        with theirs, self._log(name).open("wb") as log:
            self._processes[name] = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=log,
                env=dict(self.environ),
                start_new_session=True,  # Ctrl-C is for run_test.py
            )
        return ours

    def _log(self, name: str) -> Path:
        return self.folder / f"agent-{name}.log"

    def _how_it_ended(self, name: str) -> str:
        process = self._processes.get(name)
        if process is None:
            return "it was given back"
        try:
            how = f"its agent {reaping.describe_exit(process.wait(END_TIMEOUT))}"
        except subprocess.TimeoutExpired:
            how = "its agent closed the connection"
        said = tail(self._log(name), lines=5)
        return f"{how}: {said}" if said else how

    def release(self, name: str) -> None:
        process = self._processes.pop(name, None)
        if process is not None:
            _end(process)

    def close(self) -> None:
        """End all commands: their agents have ended everything below them when their stdin ends."""
        processes, self._processes = self._processes, {}
        for process in processes.values():
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    reaping.end(process, by_itself=END_TIMEOUT, after_sigterm=END_TIMEOUT)
