"""Runs programs in forks of an interpreter that has imported torch and pytest, but nothing of this tree.

That saves two seconds of a core for each. It is for programs that do not look at how their interpreter was started.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, NoReturn

PRELOADED = ("torch", "expecttest", "numpy", "pytest")
# Variables that an interpreter, or torch, reads only once, when it starts.
_READ_AT_START = ("PYTHON", "TORCH", "PYTORCH", "OMP_", "MKL_", "CUDA_", "HIP_", "LD_")
_READ_LATER = ("PYTHONPATH", "TORCH_TESTING_EXT_", "PYTORCH_TEST", "PYTORCH_NVML_BASED_CUDA_CHECK")
_MOST = 1 << 20  # bytes of a request
AGENT = "torch_testing_ext.runner.agent"
_OF_PYTEST = ("pytest", "_pytest", "pluggy", "iniconfig")
_END = b"end"  # asks a keeper to kill what its program has left
_SET_CHILD_SUBREAPER = 36  # of prctl()

_starting = threading.Lock()
_server: _Server | None = None


def run_warm(
    *words: str, cwd: Path | str, env: Mapping[str, str], timeout: float = 300, together: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run `python *words` to its end. The first word is a file or `-m`. `together`: stderr goes to stdout."""
    if not _would_start_alike(env):
        return run_cold(*words, cwd=cwd, env=env, timeout=timeout, together=together)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        streams = (None, out.fileno(), out.fileno() if together else errors.fileno())
        process = _the_server().start(words, cwd, env, streams)
        try:
            code = process.wait(timeout)
        finally:
            process.end()
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


def start_warm(
    *words: str,
    cwd: Path | str,
    env: Mapping[str, str],
    stdout: int | IO[str] = subprocess.PIPE,
    stderr: int | IO[str] = subprocess.PIPE,
) -> WarmProcess | subprocess.Popen[str]:
    """Start `python *words`. Where it is run_test.py, its zygote is a fork of it, too, which has imported torch."""
    given = [stream if isinstance(stream, int) else stream.fileno() for stream in (stdout, stderr)]
    if any(stream >= 0 and os.isatty(stream) for stream in given) or not _would_start_alike(env):
        return start_cold(*words, cwd=cwd, env=env, stdout=stdout, stderr=stderr)
    pipes: list[IO[str] | None] = [None, None]
    to_close = []
    for number, stream in enumerate(given):
        if stream == subprocess.PIPE:
            reading, given[number] = os.pipe()
            pipes[number] = open(reading)  # noqa: SIM115
            to_close.append(given[number])
    try:
        process = _the_server().start(words, cwd, env, (None, given[0], given[1]))
    finally:
        for fd in to_close:
            os.close(fd)
    process.stdout, process.stderr = pipes
    return process


def start_on_terminal(*words: str, cwd: Path | str, env: Mapping[str, str], terminal: int) -> WarmProcess:
    """Start `python *words` with a terminal as stdin, stdout and stderr."""
    return _the_server().start(words, cwd, env, (terminal, terminal, terminal))


def start_agent(stream: socket.socket, errors: IO[bytes], env: Mapping[str, str]) -> WarmProcess:
    """Start the agent of a node on a stream, in a session of its own. Its zygote is a fork of it, too."""
    streams = (stream.fileno(), stream.fileno(), errors.fileno())
    return _the_server().start(["-m", AGENT], Path.cwd(), env, streams, session=True)


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


def _the_server() -> _Server:
    global _server
    with _starting:
        if _server is None or _server.owner != os.getpid():
            _server = _Server()
        return _server


class WarmProcess:
    """A program in a fork of the server: of `subprocess.Popen`, the part that tests use."""

    stdout: IO[str] | None = None
    stderr: IO[str] | None = None

    def __init__(self, words: Sequence[str], keeper: socket.socket):
        self.args = list(words)
        self.returncode: int | None = None
        self._keeper = keeper
        self.pid = int(keeper.recv(32))

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._keeper.settimeout(timeout)
            try:
                self.returncode = int(self._keeper.recv(32))
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0) from None
            self._keeper.close()  # until now, the pid was that of a zombie at least
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def communicate(self) -> tuple[str | None, str | None]:
        """Wait for the end, and return all output that was not read before."""

        def read(pipe: IO[str] | None) -> str | None:
            if pipe is None:
                return None
            with pipe:
                return pipe.read()

        with ThreadPoolExecutor(2) as pool:
            out, errors = pool.map(read, (self.stdout, self.stderr))
        self.wait()
        return out, errors

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def end(self) -> None:
        """Kill the program, unless it has ended, and then all processes that it has left."""
        if self.returncode is None:
            self._keeper.settimeout(None)
            self._keeper.send(_END)
            os.kill(self.pid, signal.SIGKILL)
            self.returncode = int(self._keeper.recv(32))
            self._keeper.recv(32)  # nothing: the keeper has ended
            self._keeper.close()


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

    def start(
        self,
        words: Sequence[str],
        cwd: Path | str,
        env: Mapping[str, str],
        streams: tuple[int | None, int, int],
        session: bool = False,
    ) -> WarmProcess:
        """Start a program. `streams`: for 0, 1 and 2; without one for 0, it is empty. `session`: in one of its own."""
        request = json.dumps({"words": words, "cwd": str(cwd), "env": dict(env), "session": session}).encode()
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, open(os.devnull) as empty:
            first = empty.fileno() if streams[0] is None else streams[0]
            socket.send_fds(self._socket, [request], [theirs.fileno(), first, *streams[1:]])
        return WarmProcess(words, mine)

    def close(self) -> None:
        if os.getpid() == self.owner:
            self._socket.close()
            self._process.wait()


# -- in the server


def _serve(requests: socket.socket) -> list[str]:
    """Start a program for each request. Returns in a program, with the words of its command line."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(requests, _MOST, 4)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # keepers
                pass
        if not data:
            os._exit(0)
        if os.fork() == 0:
            requests.close()
            return _keep(json.loads(data), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _keep(request: dict, reply: int, *streams: int) -> list[str]:
    """Fork the program, and tell its pid and then its exit code."""
    pid = os.fork()
    if pid == 0:
        os.close(reply)
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
        for descriptor in streams:
            os.close(descriptor)
        if request["session"]:
            os.setsid()
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        return request["words"]
    for descriptor in streams:
        os.close(descriptor)
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # it gets what the program leaves
    with contextlib.suppress(BrokenPipeError), socket.socket(fileno=reply) as client:
        client.send(str(pid).encode())
        code = _code_of(pid)
        client.send(str(code).encode())
        if client.recv(32) == _END:
            _kill_children()
        else:
            os.waitpid(pid, 0)
    os._exit(0)


def _code_of(pid: int) -> int:
    """Wait for the end of a child, and let it be a zombie."""
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)) is not None and ended.si_pid != pid:
        os.waitpid(ended.si_pid, 0)
    assert ended is not None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _kill_children() -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
            os.waitpid(-1, 0)


# -- in a program


def _become(words: list[str]) -> None:
    """Run a program as `python *words` does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.orig_argv[1:] = words
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    is_module = words[0] == "-m"
    first = os.getcwd() if is_module else str(Path(words[0]).parent.absolute())
    sys.path[:1] = [first, *(path or os.getcwd() for path in added if path)]
    sys.argv = words[1:] if is_module else words
    if Path(words[0]).name == "run_test.py" or words[:2] == ["-m", AGENT]:
        _fork_zygotes()
    if is_module:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")


def _fork_zygotes() -> None:
    """Have run_test.py fork its zygote, which has not imported pytest: that tells it which files need pytest."""
    for name in [*sys.modules]:
        if name.partition(".")[0] in _OF_PYTEST:
            del sys.modules[name]
    from torch_testing_ext.runner.processes import zygote_client

    substitute = types.SimpleNamespace(**{**vars(subprocess), "Popen": _ForkedZygote})
    zygote_client.subprocess = substitute  # type: ignore[attr-defined]


class _ForkedZygote:
    """The process of a zygote: of `subprocess.Popen`, the part that run_test.py uses for it."""

    def __init__(
        self, command: list[str], *, stdin: int, stdout: IO[bytes], stderr: IO[bytes], pass_fds: list[int], env: dict
    ):
        assert stdin == subprocess.DEVNULL and stderr is stdout, "not as it was when this was written"
        self.returncode: int | None = None
        gc.collect()  # what is closed in the child must not be closed once more when it is collected
        self.pid = os.fork()
        if self.pid == 0:
            _become_zygote(command, stdout.fileno(), pass_fds, env)
        self._ended = os.pidfd_open(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a zygote", timeout or 0.0)
            os.close(self._ended)
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


def _become_zygote(command: list[str], log: int, kept: list[int], env: dict) -> NoReturn:
    """Run `python -c CODE WORDS...` as a new interpreter would."""
    try:
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in (0, 1, 2, *kept):
                with contextlib.suppress(OSError):  # it was the listing's own
                    os.close(int(name))
        sys.stdout, sys.stderr = (open(fd, "w", closefd=False) for fd in (1, 2))  # noqa: SIM115
        os.environ.clear()
        os.environ.update(env)
        code, *sys.argv[1:] = command[command.index("-c") + 1 :]
        sys.argv[0] = "-c"
        sys.modules["__main__"] = types.ModuleType("__main__")
        from torch_testing_ext._process import fork_safety

        fork_safety.mark_fork_safe()
        exec(code, vars(sys.modules["__main__"]))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


if __name__ == "__main__":
    for _name in PRELOADED:
        with contextlib.suppress(ImportError):
            __import__(_name)
    gc.collect()
    gc.freeze()  # pytest collects garbage several times at its end, which takes 0.4 s each if it visits all of torch
    _become(_serve(socket.socket(fileno=int(sys.argv[1]))))
