"""Runs programs by a warm server of this process, so that they do not wait for the import of torch."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

WARM = ("-m", "torch_testing_ext.warm")
# Seconds. Whatever happens, a server ends so soon.
_IDLE = "300"

# An agent that uses a server, as run_test.py does: those of the product may be on any machine, and use none.
_AGENT = """
from functools import partial
from torch_testing_ext.runner.cluster import agent
from torch_testing_ext.runner.processes.preloaded_client import WarmUp
from torch_testing_ext.warm.served_process import find_server
agent.FileProcesses = partial(agent.FileProcesses, warm_up=WarmUp(server=find_server(may_start=True)))
agent.main()
"""

# By process: the folder for its servers.
_folders: dict[int, str] = {}
# By process: what removes its folder.
_removers: dict[int, subprocess.Popen[bytes]] = {}
# A server that is only starting may put its socket there meanwhile, so that the folder is not empty.
_REMOVE = 'read -r _; for attempt in 1 2 3 4 5 6 7 8 9; do rm -rf "$1" && break; sleep 1; done'
# The folders, and the values of PYTHONPATH, for which there is a server.
_started: set[tuple[str, str]] = set()


def run_warm(
    *words: str, cwd: Path | str, env: Mapping[str, str], timeout: float = 300, together: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run `python *words` to its end. The first word is a file or `-m`. `together`: stderr goes to stdout."""
    return run_cold(*WARM, *words, cwd=cwd, env=with_server(env), timeout=timeout, together=together)


def run_cold(
    *words: str, cwd: Path | str, env: Mapping[str, str], timeout: float = 300, together: bool = False
) -> subprocess.CompletedProcess[str]:
    """The same in a new interpreter."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if together else subprocess.PIPE,
        text=True,
        timeout=timeout,
        check=False,
    )


def start_run(
    *words: str,
    cwd: Path | str,
    env: Mapping[str, str],
    stdout: int | IO[str] = subprocess.PIPE,
    stderr: int | IO[str] = subprocess.PIPE,
) -> subprocess.Popen[str]:
    """Start `python run_test.py ...`, which imports no torch itself, but has its preloaded server from the server."""
    environ = with_server(env)
    server = (environ["XDG_RUNTIME_DIR"], environ.get("PYTHONPATH", ""))
    if server not in _started:
        # The run uses a server that is there, and starts none.
        run_cold(*WARM, "-c", "pass", cwd=cwd, env=environ)
        _started.add(server)
    return start_cold(*words, cwd=cwd, env=environ, stdout=stdout, stderr=stderr)


def start_on_terminal(*words: str, cwd: Path | str, env: Mapping[str, str], terminal: int) -> subprocess.Popen[bytes]:
    """Start `python *words` with a terminal as stdin, stdout and stderr."""
    command = [sys.executable, *WARM, *words]
    return subprocess.Popen(command, cwd=cwd, env=with_server(env), stdin=terminal, stdout=terminal, stderr=terminal)


def start_agent(stream: socket.socket, errors: IO[bytes], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the agent of a node on a stream, in a session of its own.

    Its preloaded server is a program of the server, too.
    """
    return subprocess.Popen(
        [sys.executable, "-c", _AGENT],
        env=with_server(env),
        stdin=stream,
        stdout=stream,
        stderr=errors,
        start_new_session=True,
    )


def start_cold(
    *words: str,
    before: Sequence[str] = (),
    cwd: Path | str,
    env: Mapping[str, str],
    stdout: int | IO[str] = subprocess.PIPE,
    stderr: int | IO[str] = subprocess.PIPE,
) -> subprocess.Popen[str]:
    """The same in a new interpreter. `before`: a program that starts it, with its words."""
    return subprocess.Popen(
        [*before, sys.executable, *words],
        cwd=cwd,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        text=True,
    )


def with_server(env: Mapping[str, str]) -> dict[str, str]:
    """The variables with which a program is run by the server of this process, which the first one starts."""
    environ = {name: value for name, value in env.items() if name != "TORCH_TESTING_EXT_WARM"}
    return {**environ, "XDG_RUNTIME_DIR": _folder(), "TORCH_TESTING_EXT_WARM_IDLE": _IDLE}


def _folder() -> str:
    """The folder for the servers of this process. When this process has ended, it goes, and they end."""
    pid = os.getpid()
    if pid not in _folders:
        _folders[pid] = tempfile.mkdtemp(prefix="torch_testing_ext_test_")
        reading, _ = os.pipe()
        command = ["sh", "-c", _REMOVE, "sh", _folders[pid]]
        # The other end stays open, here and in ranks that are forked, until the last of these has ended.
        _removers[pid] = subprocess.Popen(command, stdin=reading, stdout=subprocess.DEVNULL, start_new_session=True)
        os.close(reading)
    return _folders[pid]
