"""Runs programs as forks of a process of the tests that has imported torch, so that they do not wait for that."""

from __future__ import annotations

import atexit
import itertools
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

_KIT = Path(__file__).resolve().parent
_SERVER = _KIT / "program_server.py"
# Variables that Python, torch and what these load read when they start or are imported.
_READ_AT_IMPORT = ("PYTHON", "TORCH", "PYTORCH", "OMP_", "MKL_", "OPENBLAS_", "CUDA_", "NCCL_", "GLOO_", "LD_", "LC_")
_READ_LATER = "TORCH_TESTING_EXT_"

# A preloaded server that the server of the tests forks.
_PRELOADED_SERVER = """
import json, os, signal, sys
sys.path[:] = json.loads(sys.argv[3])
from torch_testing_ext._process import file_reads, sessions, system
from torch_testing_ext.runner.processes import preloaded_server
file_reads.start()
sessions.start_session(os.getppid(), signal.SIGTERM)
system.adopt_orphans()
signal.signal(signal.SIGINT, signal.SIG_IGN)
unsafe = preloaded_server.warm_up(sys.argv[4:], collapse=False)
preloaded_server.serve_run(int(sys.argv[1]), sys.argv[2], unsafe)
"""
# A run of the tests' runner, which takes the server of the tests for a warm server of its project.
_RUNNER = """
import os, sys
sys.path[0] = {folder!r}
from kit.warm import ServerOfTests
from torch_testing_ext.runner import run_site
run_site.find_server = lambda root, path, *more, make=ServerOfTests, **named: make({name!r}, path)
sys.argv[:] = sys.argv[1:]
sys.orig_argv[1:] = sys.argv
del sys.path[0], sys.modules["kit"], sys.modules["kit.warm"], ServerOfTests, run_site
path = sys.argv[0]
if path == "-m":
    import runpy
    del sys.argv[0]
    sys.path.insert(0, os.getcwd())
    runpy._run_module_as_main(sys.argv[0])
sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
__file__ = os.path.abspath(path)
exec(compile(open(path, "rb").read(), __file__, "exec"))
"""
# An agent that does so, too: those of the product may be on any machine, and use none.
_AGENT = """
import sys
from functools import partial
sys.path.insert(0, {folder!r})
from kit.warm import ServerOfTests
del sys.path[0]
from torch_testing_ext.runner.cluster import agent
from torch_testing_ext.runner.processes.preloaded_client import WarmUp
warm_up = WarmUp(server=ServerOfTests({name!r}, sys.path))
agent.FileProcesses = partial(agent.FileProcesses, warm_up=warm_up)
agent.main()
"""

_numbers = itertools.count()
# By process and variables: the names of the servers, and their processes, which end when this process has ended.
_servers: dict[tuple[object, ...], tuple[str, subprocess.Popen[bytes]]] = {}


def run_warm(
    *words: str, cwd: Path | str, env: Mapping[str, str], timeout: float = 300, together: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run `python *words` to its end. The first word is a file, `-m` or `-c`. `together`: stderr goes to stdout."""
    command = [sys.executable, *words]
    with open(os.devnull) as null, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        fds = {0: null.fileno(), 1: output.fileno(), 2: (output if together else errors).fileno()}
        program = ForkedProgram(_server(env), words, os.fspath(cwd), env, fds)
        try:
            code = program.wait(timeout)
        except subprocess.TimeoutExpired:
            program.kill()
            program.wait()
            raise subprocess.TimeoutExpired(command, timeout, _all_of(output), _all_of(errors)) from None
        texts = _all_of(output).decode(), _all_of(errors).decode()
    return subprocess.CompletedProcess(command, code, texts[0], None if together else texts[1])  # type: ignore[arg-type]


def _all_of(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


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
    path: str,
    *words: str,
    cwd: Path | str,
    env: Mapping[str, str],
    stdout: int | IO[str] = subprocess.PIPE,
    stderr: int | IO[str] = subprocess.PIPE,
) -> subprocess.Popen[str]:
    """Start `python run_test.py ...`, which imports no torch itself, and gets its preloaded server from the server.

    `path`: a file, or `-m`. A run in CI (the variable), or with `--warm=off`, gets none.
    """
    code = _RUNNER.format(folder=str(_KIT.parent), name=_server(env))
    return start_cold("-c", code, path, *words, cwd=cwd, env=env, stdout=stdout, stderr=stderr)


def run_torchtest(
    *words: str, cwd: Path | str, env: Mapping[str, str], timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run `python -m torch_testing_ext` to its end, with a preloaded server from the server."""
    environ = {name: value for name, value in env.items() if name != "CI"}
    with start_run("-m", "torch_testing_ext", *words, cwd=cwd, env=environ) as process:
        try:
            texts = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, *texts)


def start_agent(stream: socket.socket, errors: IO[bytes], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the agent of a node on a stream, in a session of its own."""
    code = _AGENT.format(folder=str(_KIT.parent), name=_server(env))
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=dict(env),
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
    """Start a new interpreter. `before`: a program that starts it, with its words."""
    return subprocess.Popen(
        [*before, sys.executable, *words],
        cwd=cwd,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        text=True,
    )


class ForkedProgram:
    """A program that a server of the tests has forked: of `subprocess.Popen`, the part that a run needs."""

    def __init__(self, name: str, words: Sequence[str], cwd: str, env: Mapping[str, str], fds: Mapping[int, int]):
        """`name`: that of the server. `fds`: the descriptors of the program, by their numbers there."""
        self.returncode: int | None = None
        self._client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._client.connect(f"\0{name}")
        request = {"words": [*words], "cwd": cwd, "environ": dict(env), "fds": [*fds]}
        socket.send_fds(self._client, [json.dumps(request).encode()], [*fds.values()])

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._client], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a program of the tests", timeout or 0.0)
            self.returncode = os.waitstatus_to_exitcode(int(self._client.recv(100)))
            self._client.close()
        return self.returncode

    def kill(self) -> None:
        self._client.send(b"k")


class ServerOfTests:
    """The server of the tests in the place of a project's warm server."""

    def __init__(self, name: str, path: Sequence[str]):
        self._name, self._path = name, path

    def start_run(
        self, directory: Path, modules: Iterable[str], environ: Mapping[str, str], channel: int, log: int
    ) -> Any:
        words = ["-c", _PRELOADED_SERVER, str(channel), str(directory), json.dumps([*self._path]), *modules]
        with open(os.devnull) as null:
            fds = {0: null.fileno(), 1: log, 2: log, channel: channel}
            return ForkedProgram(self._name, words, os.getcwd(), environ, fds)

    def close(self) -> None:
        """Nothing is kept for a run."""


def _server(env: Mapping[str, str]) -> str:
    """The name of this process's server for programs with these variables, which is started if there is none."""
    read = {
        name: value
        for name, value in env.items()
        if name.startswith(_READ_AT_IMPORT) and not name.startswith(_READ_LATER)
    }
    key = (os.getpid(), *sorted(read.items()))
    name, server = _servers.get(key, ("", None))
    # A runner within this process may have ended it, with all children.
    if server is None or server.poll() is not None:
        name = f"torch_testing_ext_test_{os.getpid()}_{next(_numbers)}"
        reading, ready = os.pipe()
        environ = {name: env[name] for name in ("PATH", "HOME", "TMPDIR") if name in env}
        command = [sys.executable, str(_SERVER), name, str(ready)]
        server = subprocess.Popen(
            command, stdin=subprocess.PIPE, env={**environ, **read}, pass_fds=[ready], start_new_session=True
        )
        atexit.register(_end, os.getpid(), server)
        os.close(ready)
        os.read(reading, 1)
        os.close(reading)
        _servers[key] = name, server
    return name


def _end(pid: int, server: subprocess.Popen[bytes]) -> None:
    if os.getpid() == pid:
        server.communicate()
