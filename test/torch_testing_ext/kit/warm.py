"""Runs programs in forks of an interpreter that has imported torch and pytest, but nothing of this tree.

That saves two seconds of a core for each. It is for programs that run to their end, and that do not look at how their
interpreter was started.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

PRELOADED = ("torch", "expecttest", "numpy", "pytest")
# Variables that an interpreter, or torch, reads only once, when it starts.
_READ_AT_START = ("PYTHON", "TORCH", "PYTORCH", "OMP_", "MKL_", "CUDA_", "HIP_", "LD_")
_READ_LATER = ("PYTHONPATH", "TORCH_TESTING_EXT_", "PYTORCH_TEST")
_MOST = 1 << 20  # bytes of a request

_starting = threading.Lock()
_server: _Server | None = None


def run_warm(
    *words: str, cwd: Path | str, env: Mapping[str, str], timeout: float = 300, together: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run `python *words` to its end. The first word is a file or `-m`. `together`: stderr goes to stdout."""
    if not _would_start_alike(env):
        return run_cold(*words, cwd=cwd, env=env, timeout=timeout, together=together)
    global _server
    with _starting:
        if _server is None or _server.owner != os.getpid():
            _server = _Server()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        streams = (out.fileno(), out.fileno() if together else errors.fileno())
        code = _server.run(words, cwd, env, timeout, streams)
        for stream in (out, errors):
            stream.seek(0)
        return subprocess.CompletedProcess(words, code, out.read(), errors.read())


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


def _would_start_alike(env: Mapping[str, str]) -> bool:
    """Whether a new interpreter in this environment would be like the server, which has that of this process."""

    def read_at_start(variables: Mapping[str, str]) -> dict[str, str]:
        return {
            name: value
            for name, value in variables.items()
            if name.startswith(_READ_AT_START) and not name.startswith(_READ_LATER)
        }

    return read_at_start(env) == read_at_start(os.environ)


class _Server:
    """The process that has imported torch, and the socket to it. It ends with this process."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        atexit.register(self.close)

    def run(
        self, words: tuple[str, ...], cwd: Path | str, env: Mapping[str, str], timeout: float, streams: tuple[int, int]
    ) -> int:
        """Run a program and return its exit code."""
        request = json.dumps({"words": words, "cwd": str(cwd), "env": dict(env)}).encode()
        mine, theirs = socket.socketpair()
        with mine:
            with theirs:
                socket.send_fds(self._socket, [request], [theirs.fileno(), *streams])
            pid = int(mine.recv(32))
            mine.settimeout(timeout)
            try:
                answer = mine.recv(32)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(list(words), timeout) from None
        return int(answer)

    def close(self) -> None:
        if os.getpid() == self.owner:
            self._socket.close()
            self._process.wait()


# -- in the server


def _serve(requests: socket.socket) -> list[str]:
    """Start a program for each request. Returns in a program, with the words of its command line."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the keepers
    while True:
        data, descriptors, _, _ = socket.recv_fds(requests, _MOST, 3)
        if not data:
            os._exit(0)
        if os.fork() == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return _keep(json.loads(data), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _keep(request: dict, reply: int, out: int, errors: int) -> list[str]:
    """Fork the program, and tell its pid and then its exit code."""
    pid = os.fork()
    if pid == 0:
        os.close(reply)
        os.dup2(out, 1)
        os.dup2(errors, 2)
        for descriptor in (out, errors):
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        return request["words"]
    for descriptor in (out, errors):
        os.close(descriptor)
    with contextlib.suppress(BrokenPipeError):
        os.write(reply, str(pid).encode())
        _, status = os.waitpid(pid, 0)
        os.write(reply, str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _become(words: list[str]) -> None:
    """Run a program as `python *words` does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    is_module = words[0] == "-m"
    first = os.getcwd() if is_module else str(Path(words[0]).parent.absolute())
    sys.path[:1] = [first, *(path or os.getcwd() for path in added if path)]
    sys.argv = words[1:] if is_module else words
    if is_module:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    for _name in PRELOADED:
        with contextlib.suppress(ImportError):
            __import__(_name)
    gc.collect()
    gc.freeze()  # pytest collects garbage several times at its end, which takes 0.4 s each if it visits all of torch
    _become(_serve(socket.socket(fileno=int(sys.argv[1]))))
