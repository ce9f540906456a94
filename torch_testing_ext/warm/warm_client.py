"""The client: it hands its program to a server, passes signals on, and ends as the program ends.

It becomes the program itself, in a new interpreter, whenever anything is in doubt. It imports little, to start fast.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import select
import signal
import socket
import struct
import sys

from torch_testing_ext._process.launcher_variables import without_launch
from torch_testing_ext._process.private_folders import socket_name

from . import server_link
from .server_link import (
    BeginProgram,
    Message,
    ProgramBegun,
    ProgramEnded,
    ProgramReady,
    ProgramStopped,
    RunCold,
    RunProgram,
    SendSignal,
    Stale,
    StopServer,
    folder_of_servers,
    path_of_servers,
    server_key,
)

# Importing typing takes a tenth of the client's time.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

# Seconds after which a server ends.
IDLE = "TORCH_TESTING_EXT_WARM_IDLE"
# 0: no server is used.
OFF = "TORCH_TESTING_EXT_WARM"
_SET_BY_US = "PYTORCH_NVML_BASED_CUDA_CHECK"
_MOST_SERVERS = 4
_START_TIMEOUT = 10.0
_ANSWER_TIMEOUT = 30.0
# SI_KERNEL: the code of a signal of the terminal.
_FROM_TERMINAL = 0x80
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
_NOT_PASSED = {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGTTIN, signal.SIGTTOU, signal.SIGIO}


# Another server may run the program.
_STALE = "stale"


class NoServer(Exception):
    """No server runs the program. The text says why; it is empty if that is as it should be."""


class WarmProgram:
    """A program: `kind` is "file", "-m" or "-c", the first of `words` the file, module or code."""

    def __init__(self, kind: str, words: list[str]):
        self.kind, self.words = kind, words

    def run_cold(self) -> NoReturn:
        words = self.words if self.kind == "file" else [self.kind, *self.words]
        os.execve(sys.executable, [sys.executable, *_flags(), *words], own_environ())


def _flags() -> list[str]:
    """The options of this interpreter, which programs get, too."""
    return sys.orig_argv[1 : sys.orig_argv.index("-m")] if "-m" in sys.orig_argv else []


def own_environ() -> dict[str, str]:
    """The variables with which this process was started: importing this package sets one more."""
    environ = dict(os.environ)
    with open("/proc/self/environ", "rb") as file:
        if f"{_SET_BY_US}=".encode() not in file.read():
            environ.pop(_SET_BY_US, None)
    return environ


# -- servers


class ServerAddress:
    """The place of the server for this process, and how to start one. Raises OSError if there is no safe place."""

    def __init__(self, flags: list[str]) -> None:
        """`flags`: the options of this interpreter, which programs get, too."""
        self._path, self._flags = path_of_servers(), flags
        self._folder = folder_of_servers()
        self._socket = os.path.join(self._folder, f"{server_key(self._path)}.socket")

    def connect(self) -> socket.socket | None:
        """A connection to the server of this process; None if there is none."""
        return _connect(self._socket)

    def start(self) -> socket.socket:
        """Start a server, unless another client does, and connect to it. Raises NoServer."""
        reading, ready = os.pipe()
        with open(os.path.join(self._folder, "lock"), "wb") as lock, open(reading, "rb"):
            # Until the server is ready.
            fcntl.flock(lock, fcntl.LOCK_EX)
            client = self.connect()
            if client is None:
                for path in sockets(self._folder)[: 1 - _MOST_SERVERS]:
                    ask(path, StopServer())
                self._spawn(ready)
                os.close(ready)
                select.select([reading], [], [], _START_TIMEOUT)
                client = self.connect()
            else:
                os.close(ready)
        if client is None:
            raise NoServer("the server did not start")
        return client

    def _spawn(self, ready: int) -> None:
        """Start the process of a server, which closes `ready` when it listens."""
        package = os.path.abspath(__file__)
        # The folder from which this package is imported.
        for _ in range(3):
            package = os.path.dirname(package)
        code = (
            f"import sys; _modules = [*sys.modules]; _path = {self._path!r}; sys.path[:] = [{package!r}, *_path]; "
            "from torch_testing_ext.warm.warm_server import main as _main; _main(_modules, _path)()"
        )
        idle = os.environ.get(IDLE, "")
        words = [sys.executable, *self._flags, "-c", code, self._socket, idle if idle.isdigit() else "1800", str(ready)]
        middle = os.fork()
        if middle != 0:
            os.waitpid(middle, 0)
            return
        # As a grandchild: a program that this process becomes has no such child.
        try:
            # Takes a while.
            import subprocess

            for number in signal.valid_signals():
                if signal.getsignal(number) is signal.SIG_IGN:
                    signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            os.umask(0o077)
            null = subprocess.DEVNULL
            # With the variables of a launcher, the server would look like a rank that others wait for.
            environ = without_launch(own_environ())
            subprocess.Popen(
                words, stdin=null, stdout=null, stderr=null, env=environ, pass_fds=[ready], start_new_session=True
            )
        finally:
            os._exit(0)


def _connect(path: str) -> socket.socket | None:
    client = socket.socket(socket.AF_UNIX, server_link.KIND)
    client.settimeout(_ANSWER_TIMEOUT)
    with contextlib.suppress(OSError):
        with socket_name(path) as name:
            client.connect(name)
        credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        _, user, _ = struct.unpack("3i", credentials)
        if user == os.getuid():
            return client
    client.close()
    return None


def ask(path: str, question: Message) -> Message | None:
    """Ask a server. Removes the socket that a killed one has left."""
    client = _connect(path)
    if client is None:
        with contextlib.suppress(OSError):
            os.unlink(path)
        return None
    with client, contextlib.suppress(EOFError, OSError, ValueError):
        server_link.send(client, question)
        answer, _ = server_link.receive(client)
        return answer
    return None


def sockets(place: str) -> list[str]:
    """The sockets in the folder of servers, the oldest first."""
    paths = [os.path.join(place, name) for name in os.listdir(place) if name.endswith(".socket")]
    return sorted(paths, key=lambda path: os.stat(path).st_mtime)


# -- a program


def run(program: WarmProgram) -> NoReturn:
    """Run the program by a server, which is started if there is none; in a new interpreter if anything is in doubt."""
    why = "" if _has_to_be_cold() else _STALE
    tries = 0
    while why == _STALE and tries < 2:
        tries += 1
        try:
            address = ServerAddress(_flags())
            with address.connect() or address.start() as client:
                _run_by(client, program)
        except NoServer as error:
            why = str(error)
        except OSError as error:
            why = f"no server can be used: {error}"
    # A stale one ends because its files have just been changed: that is as it should be.
    if why not in ("", _STALE):
        warn(f"{why}: running cold")
    program.run_cold()


def _has_to_be_cold() -> bool:
    """Whether no server can run a program as a new interpreter does."""
    if os.environ.get(OFF) == "0" or not sys.platform.startswith("linux"):
        return True
    # Coverage begins with the interpreter.
    cold = ["COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG"]
    # Without it, ranks of mpirun and srun find each other by their parent.
    if "MASTER_PORT" not in os.environ:
        cold += ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_STEP_NUM_TASKS"]
    if any(name in os.environ for name in cold):
        return True
    # In the background, reading from the terminal has to stop the program.
    with contextlib.suppress(OSError):
        return os.isatty(0) and os.tcgetpgrp(0) != os.getpgrp()
    return False


def _run_by(client: socket.socket, program: WarmProgram) -> NoReturn:
    """Have the server run the program, and end as it ends. Raises NoServer if the program does not begin."""
    open_now = [int(name) for name in os.listdir("/proc/self/fd")]
    fds = sorted(fd for fd in open_now if _is_inherited(fd))
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if fds and fds[-1] + len(fds) + 2 > limit:
        raise NoServer("a descriptor that it inherits is near the limit")
    leads = os.getpgrp() == os.getpid()
    hand_over(client, program, own_environ(), {fd: fd for fd in fds}, leads)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    ignored = {number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN}
    passed = {int(number) for number in signal.valid_signals()} - _NOT_PASSED - ignored
    signal.pthread_sigmask(signal.SIG_BLOCK, passed | {signal.SIGIO})
    try:
        begin(client)
    except NoServer:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        raise
    _end_as(_follow(client, passed))


def hand_over(
    client: socket.socket,
    program: WarmProgram,
    environ: dict[str, str],
    fds: dict[int, int],
    leads: bool,
    adopts: bool = False,
) -> None:
    """Ask the server for a program, which waits for `begin`. Raises NoServer if it refuses.

    `fds`: the descriptors of the program, by their numbers there. For `leads` and `adopts`, see the supervisor.
    """
    cwd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    mask = os.umask(0)
    os.umask(mask)
    ignored = [number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN]
    request = RunProgram(
        kind=program.kind,
        words=program.words,
        environ=environ,
        umask=mask,
        ignored=[number for number in ignored if number not in _IGNORED_BY_PYTHON],
        blocked=sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        numbers=[*fds],
        leads=leads,
        adopts=adopts,
    )
    # If the server has just ended, the answer will say so.
    with contextlib.suppress(ConnectionError):
        server_link.send(client, request, [cwd, *fds.values()])
    os.close(cwd)
    match _receive(client):
        case ProgramReady():
            return
        case RunCold(why=why):
            raise NoServer(why)
        case _:
            # Its files have changed, or it has ended, when idle.
            raise NoServer(_STALE)


def begin(client: socket.socket) -> None:
    """Have the program begin. Raises NoServer if it does not."""
    with contextlib.suppress(OSError):
        server_link.send(client, BeginProgram())
    if not isinstance(_receive(client), ProgramBegun):
        raise NoServer("the server has ended")


def _is_inherited(fd: int) -> bool:
    # It may have been the listing's own.
    with contextlib.suppress(OSError):
        return os.get_inheritable(fd)
    return False


def _receive(client: socket.socket) -> Message:
    """The next message of the server or the supervisor."""
    try:
        message, _ = server_link.receive(client)
    except TimeoutError:
        return RunCold("the server does not answer")
    except ValueError:
        return RunCold("the answer of the server cannot be read")
    except EOFError:
        return Stale()
    return message


def _follow(client: socket.socket, passed: set[int]) -> int:
    """Pass signals on until the program ends. Returns its wait status."""
    server_link.signal_news(client)
    while True:
        with contextlib.suppress(BlockingIOError):
            while True:
                match _receive(client):
                    case ProgramStopped():
                        os.kill(os.getpid(), signal.SIGSTOP)
                    case ProgramEnded(status=status):
                        return status
                    case _:
                        # The supervisor was killed, and the program with it.
                        return signal.SIGKILL
        info = signal.sigwaitinfo(passed | {signal.SIGIO})
        if info.si_signo != signal.SIGIO:
            # The terminal sends to all processes of a group, `kill` to one.
            group = info.si_code == _FROM_TERMINAL or info.si_signo == signal.SIGCONT
            with contextlib.suppress(OSError):
                server_link.send(client, SendSignal(info.si_signo, group))


def _end_as(status: int) -> NoReturn:
    """End this process as the program has ended."""
    if os.WIFEXITED(status):
        os._exit(os.WEXITSTATUS(status))
    number = os.WTERMSIG(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
    os._exit(128 + number)


def warn(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"torch_testing_ext.warm: {text}\n".encode(errors="surrogateescape"))
